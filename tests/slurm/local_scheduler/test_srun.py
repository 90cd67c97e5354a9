"""The tasks of a step: their variables, their output, and what happens when one fails."""

import re
import time
from pathlib import Path

import pytest

from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.local_scheduler.processes import identify
from tests.support.slurm import read_log, run_job, submit, wait_for_job, wait_until


def test_variables_of_the_job_and_of_a_step(any_slurm: str) -> None:
    counts = "JOB_NUM_NODES|NNODES|NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_NODE|RESTART_COUNT"
    show = f"env | grep -E '^SLURM_({counts}|PROCID|LOCALID|NODEID|STEP_.*)=' | sort"
    Path("step.sh").write_text(f"echo $({show})")
    printed = run_job(f"{show}\necho ---\nsrun -n3 sh step.sh", "--nodes=2", "--ntasks-per-node=2", "--time=5")
    job, steps = printed.split("---\n")
    assert job.split() == [
        "SLURM_JOB_NUM_NODES=2", "SLURM_LOCALID=0", "SLURM_NNODES=2", "SLURM_NODEID=0", "SLURM_NPROCS=4",
        "SLURM_NTASKS=4", "SLURM_NTASKS_PER_NODE=2", "SLURM_PROCID=0", "SLURM_TASKS_PER_NODE=2(x2)",
    ]  # fmt: skip
    tasks = [dict(word.split("=", 1) for word in line.split()) for line in steps.splitlines() if "SLURM_" in line]
    assert sorted((task["SLURM_PROCID"], task["SLURM_NODEID"], task["SLURM_LOCALID"]) for task in tasks) == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
    ]
    for task in tasks:
        assert (task["SLURM_NTASKS"], task["SLURM_STEP_NUM_TASKS"], task["SLURM_STEP_NUM_NODES"]) == ("3", "3", "2")
        assert (task["SLURM_STEP_TASKS_PER_NODE"], task["SLURM_STEP_ID"]) == ("2,1", "0")


def test_tasks_that_fail(any_slurm: str) -> None:
    printed = run_job("srun -n2 bash -c 'exit $((3 + SLURM_PROCID))'; echo code $?", "--nodes=2")
    assert re.search(r"^srun: error: \S+: task 0: Exited with exit code 3$", printed, re.MULTILINE)
    assert re.search(r"^srun: error: \S+: task 1: Exited with exit code 4$", printed, re.MULTILINE)
    assert "code 4" in printed


def test_one_bad_task_ends_the_others(any_slurm: str) -> None:
    Path("step.sh").write_text("sleep 0.5; [ $SLURM_PROCID = 0 ] || kill -9 $$; exec sleep 60")
    began = time.monotonic()
    printed = run_job("srun --kill-on-bad-exit=1 bash step.sh; echo code $?", "--nodes=2")
    assert time.monotonic() - began < 20
    assert re.search(r"^srun: error: \S+: task 1: Killed$", printed, re.MULTILINE)
    assert re.search(r"^srun: error: \S+: task 0: Terminated$", printed, re.MULTILINE)
    # The highest code of all tasks, SIGTERM's, not that of the task that failed first.
    assert "code 143" in printed


def test_labels_and_files(any_slurm: str) -> None:
    Path("step.sh").write_text("echo $SLURM_PROCID; echo e >&2")
    body = "srun --label sh -c 'echo out; echo err >&2'\nsrun -n3 --output=out-%j-%5t-%3n sh step.sh"
    job_id = submit(body, "--nodes=2", "--ntasks=4")
    wait_for_job(Slurm(), job_id)
    assert sorted(read_log().splitlines()) == [f"{rank}: {word}" for rank in range(4) for word in ("err", "out")]
    files = sorted(path.name for path in Path().glob("out-*"))
    assert files == [f"out-{job_id}-00000-000", f"out-{job_id}-00001-000", f"out-{job_id}-00002-001"]
    assert Path(files[2]).read_text() == "2\ne\n"


def test_more_nodes_than_the_job_has(any_slurm: str) -> None:
    printed = run_job("srun --nodes=3 true; echo code $?", "--nodes=2")
    assert "Only allocated 2 nodes asked for 3" in printed
    assert "code 1" in printed


def test_first_exit_starts_the_clock(any_slurm: str) -> None:
    body = "srun --wait=1 bash -c '[ $SLURM_PROCID = 0 ] || exec sleep 60'; echo code $?"
    printed = run_job(body, "--ntasks=2")
    assert re.search(r"^srun: First task exited 1s ago$", printed, re.MULTILINE)
    assert re.search(r"^code (137|143)$", printed, re.MULTILINE)


@pytest.mark.usefixtures("local_scheduler")
def test_gpus_are_dealt_out_to_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    printed = run_job("srun sh -c 'echo $SLURM_NODEID $CUDA_VISIBLE_DEVICES'", "--nodes=2", "--gres=gpu:2")
    assert sorted(printed.splitlines()) == ["0 4,5", "1 6,7"]


@pytest.mark.usefixtures("local_scheduler")
def test_command_that_does_not_exist() -> None:
    printed = run_job("srun no-such-command; echo code $?")
    assert "no-such-command: No such file or directory" in printed
    assert "code 2" in printed


@pytest.mark.usefixtures("local_scheduler")
def test_tasks_do_not_outlive_their_srun() -> None:
    body = (
        "srun bash -c 'echo $$ > task; exec sleep 60' &\nuntil [ -s task ]; do sleep 0.05; done\nkill -9 $!; sleep 60"
    )
    job_id = submit(body)
    wait_until(lambda: Path("task").exists() and Path("task").read_text(), "the task")
    wait_until(lambda: identify(int(Path("task").read_text())) is None, "the task's end", seconds=5)
    Slurm().cancel(job_id)
    wait_for_job(Slurm(), job_id)
