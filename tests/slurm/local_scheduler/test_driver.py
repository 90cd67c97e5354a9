"""The life of a job: its end, its time limit, its processes, its turn."""

import os
import signal
import time
from pathlib import Path

import pytest

from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.local_scheduler.jobs import load_job
from scaling_slurm.slurm.local_scheduler.processes import identify, is_alive
from tests.support.slurm import read_log, run_job, submit, wait_for_job, wait_until


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (7, "FAILED")])
def test_end_of_a_job(any_slurm: str, code: int, state: str) -> None:
    info = wait_for_job(Slurm(), submit(f"exit {code}"))
    assert (info.state, info.exit_code, info.restarts, info.source) == (state, code, 0, "scontrol")


def test_signals_are_not_ignored_in_the_job(any_slurm: str) -> None:
    status = run_job("grep -E 'SigIgn|SigBlk' /proc/self/status; srun grep -E 'SigIgn|SigBlk' /proc/self/status")
    masks = [int(line.split()[1], 16) for line in status.splitlines()]
    assert len(masks) == 4
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        assert not any(mask >> (number - 1) & 1 for mask in masks), number


@pytest.mark.usefixtures("local_scheduler")
def test_time_limit_with_a_warning() -> None:
    Path("step.sh").write_text("""trap 'echo $SLURM_PROCID warned' USR2
trap 'echo $SLURM_PROCID got TERM; exit 0' TERM
while :; do sleep 0.05; done
""")
    body = "trap 'echo script got TERM' TERM\nsrun bash step.sh &\nwait; wait; sleep 60"
    job_id = submit(body, "--nodes=2", "--time=1", "--signal=USR2@30")
    wait_until(lambda: read_log().count("warned") == 2, "the warning")
    job = load_job(int(job_id))
    assert job is not None
    assert job.start is not None
    # A minute lasts 4 seconds here: the warning comes after 2, the end after 4.
    assert 1.9 < time.time() - job.start < 3.5
    left = Slurm().seconds_left(job_id)
    assert left is not None
    assert 0 <= left <= 2
    info = wait_for_job(Slurm(), job_id)
    assert info.state == "TIMEOUT"
    assert read_log().count("got TERM") >= 3
    assert "CANCELLED AT" in read_log()
    assert "DUE TO TIME LIMIT ***" in read_log()


@pytest.mark.usefixtures("local_scheduler")
def test_warning_for_the_script_only() -> None:
    body = "trap 'echo script warned; exit 0' USR1\nsrun bash -c \"trap 'echo task warned' USR1; sleep 30\" &\nwait"
    assert run_job(body, "--time=1", "--signal=B:USR1@45") == "script warned\n"


@pytest.mark.usefixtures("local_scheduler")
def test_stubborn_and_daemonised_processes_are_gone_after_the_job() -> None:
    Path("step.sh").write_text("trap '' TERM; (setsid sleep 300 & echo $! > daemon); echo $$ > task; sleep 300")
    job_id = submit("trap '' TERM; srun bash step.sh")
    wait_until(lambda: Path("task").exists() and Path("task").read_text(), "the task")
    Slurm().cancel(job_id)
    assert wait_for_job(Slurm(), job_id).state == "CANCELLED"
    assert [identify(int(Path(name).read_text())) for name in ("daemon", "task")] == [None, None]


@pytest.mark.usefixtures("local_scheduler")
def test_driver_that_is_killed_takes_the_job_with_it() -> None:
    Path("step.sh").write_text("(setsid sleep 300 & echo $! > daemon); echo $$ > task; exec sleep 300")
    job_id = submit("srun bash step.sh")
    wait_until(lambda: Path("task").exists() and Path("task").read_text(), "the task")
    job = load_job(int(job_id))
    assert job is not None
    os.kill(job.driver.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(job.driver), "the driver's end")
    info = Slurm().job(job_id)
    assert info is not None
    assert (info.state, info.is_live) == ("NODE_FAIL", False)

    def both_ended() -> bool:
        return all(identify(int(Path(name).read_text())) is None for name in ("daemon", "task"))

    wait_until(both_ended, "the task and its daemon to end")


@pytest.mark.usefixtures("local_scheduler")
def test_places_and_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    first = submit("sleep 1.5")
    dependent = submit("true", f"--dependency=afterany:{first}")
    wait_for_job(Slurm(), first, "RUNNING")
    monkeypatch.setenv("SCALING_LOCAL_JOBS", "1")
    queued = submit("true")
    wanted = {dependent: "Dependency", queued: "Resources"}
    wait_until(lambda: {key: info.reason for key, info in Slurm().jobs(wanted).items()} == wanted, "both reasons")
    ends = [wait_for_job(Slurm(), job_id) for job_id in (first, dependent, queued)]
    assert [info.state for info in ends] == ["COMPLETED"] * 3


@pytest.mark.usefixtures("local_scheduler")
def test_output_that_cannot_be_opened() -> None:
    info = wait_for_job(Slurm(), submit("true", "--output=no/such/folder/log"))
    assert info.state == "FAILED"
