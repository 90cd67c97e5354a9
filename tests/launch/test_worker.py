"""What a rank does in a job: it trains for real here, alone; only Slurm's programs are stand-ins."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scaling_slurm import run_directory
from scaling_slurm.errors import ExitCode
from scaling_slurm.launch import worker
from scaling_slurm.log import NAME
from scaling_slurm.run_directory import RunDirectory, read_json, read_lines
from tests.support.run_records import add_attempt, make_run

pytestmark = pytest.mark.usefixtures("own_home")

STEP = {
    "SCALING_RENDEZVOUS": "slurm",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_RESTART_COUNT": "2",
}


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs, which say that the job runs and has an hour left; `asked` holds what they were asked."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    answer(folder, "squeue", "echo 'RUNNING|1:00:00'")
    answer(folder, "scontrol", "echo JobId=7 JobState=RUNNING Restarts=0 EndTime=2100-01-01T00:00:00")
    answer(folder, "sacct", "")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def answer(programs: Path, name: str, body: str) -> None:
    (programs / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {programs}/../asked\n{body}\n')
    (programs / name).chmod(0o755)


def stop_while_loading(programs: Path) -> None:
    """The stop signal comes as the rank asks for its time limit, before torch is there."""
    answer(programs, "squeue", f"kill -USR2 {os.getpid()}; echo 'RUNNING|1:00:00'")


def asked(programs: Path) -> str:
    return (programs.parent / "asked").read_text()


@pytest.fixture
def rank(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a rank of a new attempt to its end; returns its exit code."""
    logger, before = logging.getLogger(NAME), signal.getsignal(signal.SIGCONT)

    def leave(code: int) -> None:
        raise Left(code)

    def run_rank(run: RunDirectory, **step: str) -> int:
        for name, value in (STEP | {"SCALING_ATTEMPT": str(run.claim_attempt().number)} | step).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Left) as left:
            worker.run_task(str(run.path))
        return int(left.value.args[0])

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield run_rank
    signal.signal(signal.SIGCONT, before)
    logger.handlers.clear()
    logger.propagate = True


def slurm_run(folder: Path, *overrides: str) -> RunDirectory:
    return make_run(
        folder, "small-1", "trainer.num_steps=3", "trainer.global_batch_size=2", *overrides, cluster="slurm"
    )


def test_a_run_that_finishes(rank: Callable[..., int], tmp_path: Path, programs: Path):
    run = slurm_run(tmp_path)
    assert rank(run) == ExitCode.OK
    job = read_json(run.attempt(1).job_file) or {}
    assert (job["job_id"], job["restart"]) == ("7", 2)
    assert [record["step"] for record in read_lines(run.metrics_file)] == [1, 2, 3]
    end = read_json(run.attempt(1).end_file) or {}
    assert (end["cause"], end["step"], end["requeue"]) == ("finished", 3, False)
    assert [event["event"] for event in read_lines(run.events_file)] == ["attempt", "end"]
    assert "requeue" not in asked(programs)


def test_a_run_that_is_preempted_leaves_its_requeue_to_the_job_script(
    rank: Callable[..., int], tmp_path: Path, programs: Path
):
    """Slurm requeues a job that is being cancelled, if asked; scancel ends the job script, but no program of a rank."""
    run = slurm_run(tmp_path)
    stop_while_loading(programs)
    assert rank(run) == ExitCode.REQUEUE
    end = read_json(run.attempt(1).end_file) or {}
    assert (end["cause"], end["requeue"]) == ("preempted", True)
    assert run.attempt(1).requeue_file.exists()
    assert "requeue" not in asked(programs)


def test_the_time_that_is_left_tells_a_time_limit(rank: Callable[..., int], tmp_path: Path, programs: Path):
    run = slurm_run(tmp_path, "trainer.requeue.max_timeouts=0")
    answer(programs, "squeue", "echo 'RUNNING|0:05'")
    assert rank(run) == ExitCode.JOB_FAILED, "an interrupted run that does not go on has not succeeded"
    end = read_json(run.attempt(1).end_file) or {}
    assert (end["cause"], end["requeue"]) == ("time_limit", False)
    assert end["reason"] == "time_limit 1 times; trainer.requeue.max_timeouts is 0"
    assert "requeue" not in asked(programs)


def test_a_cancelled_job_does_not_come_back(rank: Callable[..., int], tmp_path: Path, programs: Path):
    run = slurm_run(tmp_path)
    stop_while_loading(programs)
    with open(programs / "squeue", "a") as script:
        script.write(
            '[[ "$*" == *%i* ]] && echo "7|7|COMPLETING|None|node1|2020-01-01T00:00:00|2020-01-01T01:00:00|1:00"'
        )
    assert rank(run) == ExitCode.OK
    assert (read_json(run.attempt(1).end_file) or {})["cause"] == "cancelled"
    assert "requeue" not in asked(programs)


def test_a_stop_file_ends_the_run_in_order(rank: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scaling_slurm.core.trainer.preemption.POLL_SECONDS", 0.01)
    run = slurm_run(tmp_path, "trainer.num_steps=1000000")
    run.stop_file.touch()
    assert rank(run) == ExitCode.OK
    assert (read_json(run.attempt(1).end_file) or {})["cause"] == "stop_file"


def test_without_slurms_programs_on_the_node_the_run_trains_all_the_same(
    rank: Callable[..., int], tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a container."""
    monkeypatch.setenv("PATH", "/nowhere")
    run = slurm_run(tmp_path)
    assert rank(run) == ExitCode.OK
    assert run.finished_file.exists()


def test_a_lost_attempt_is_noted_and_too_many_end_the_job(
    rank: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = slurm_run(tmp_path, "trainer.requeue.max_node_failures=0")
    add_attempt(run, "6")
    assert rank(run) == ExitCode.OK
    assert {"event": "lost", "attempt": 1}.items() <= list(read_lines(run.events_file))[1].items()
    run.finished_file.unlink()
    add_attempt(run, "7")
    assert rank(run) == ExitCode.REFUSED
    assert "1 attempts of job 7 ended without a word" in capsys.readouterr().err


# Failures


def test_the_last_words_of_a_rank(rank: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = slurm_run(tmp_path)
    run.config_file.write_text(run.config_file.read_text().replace("vocab_size: 64", "vocab_size: 8"))
    assert rank(run) == ExitCode.CONFIG
    [record] = run.attempt(1).failures()
    assert (record["rank"], record["consequence"], record["traceback"]) == (0, False, "")
    assert record["error"].startswith("ConfigError: ")
    assert "vocab_size is 8" in record["error"]
    assert time.time() - record["time"] < 60
    error = capsys.readouterr().err
    assert "\nerror: " in f"\n{error}"
    assert "Traceback" not in error
    assert not run.attempt(1).end_file.exists()


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (ValueError("this sample is broken"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (MemoryError(), False),
        (SystemExit(3), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_broke_is_told_apart_from_what_followed(
    rank: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    is_consequence: bool,
):
    def fail(*_: object) -> None:
        raise error

    run = slurm_run(tmp_path)
    monkeypatch.setattr(worker, "_train_in_job", fail)
    step = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert rank(run, **step) == ExitCode.UNEXPECTED
    record = json.loads(run.attempt(1).failure_file(3).read_text())
    assert (record["rank"], record["consequence"]) == (3, is_consequence)
    assert record["error"] == f"{type(error).__name__}: {error}"
    assert record["traceback"].startswith("Traceback")
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_the_error(
    rank: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "write_atomically", full)
    monkeypatch.setattr(run_directory, "write_atomically", full)
    assert rank(slurm_run(tmp_path)) == ExitCode.UNEXPECTED
    error = capsys.readouterr().err
    assert "OSError: [Errno 28] No space left on device" in error
    assert "cannot write" in error
    assert "failure-rank-00000.json: No space left on device" in error


def test_torch_is_not_loaded_before_the_stop_listener_is_there() -> None:
    code = "import sys, scaling_slurm.launch.worker; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
