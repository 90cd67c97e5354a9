"""The jobs on disk: numbers that are never given twice, file name patterns, what becomes of a job without a driver."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scaling_slurm.slurm.local_scheduler.jobs import (
    Job,
    fill_pattern,
    format_nodes,
    format_tasks,
    load_job,
    new_job_directory,
    save_job,
    state_directory,
)
from scaling_slurm.slurm.local_scheduler.processes import Process, identify


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCALING_LOCAL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def make_job(driver: Process, **fields: object) -> Job:
    job = Job(
        id=new_job_directory(), name="a b", nodes=2, tasks_per_node=[2, 1], directory="/", options={}, arguments=[],
        time_limit=None, submitted=0.0, driver=driver,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(job, name, value)
    save_job(job)
    return job


def ourselves() -> Process:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_where_the_state_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SCALING_LOCAL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory() == f"{tmp_path}/scaling/local"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert state_directory() == "/home/me/.local/state/scaling/local"


def test_numbers_are_never_given_twice(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: new_job_directory(), range(24)))
    assert sorted(numbers) == list(range(1, 25))
    (state / "jobs" / "24").rmdir()
    assert new_job_directory() == 25


def test_record_comes_back() -> None:
    job = make_job(ourselves(), options={"comment": "ä"}, state="RUNNING", start=1.5, script=ourselves())
    assert load_job(job.id) == job


@pytest.mark.parametrize(
    "driver",
    [
        # The number belongs to another process by now, or the machine was restarted.
        ourselves()._replace(start=1),
        ourselves()._replace(boot="another"),
        Process(2**22 + 1, 5, ourselves().boot),
    ],
)
def test_job_without_its_driver_has_lost_its_node(driver: Process) -> None:
    job = make_job(driver, state="RUNNING", start=1.0)
    found = load_job(job.id)
    assert found is not None
    assert (found.state, found.is_live) == ("NODE_FAIL", False)


def test_finished_job_needs_no_driver() -> None:
    job = make_job(Process(2**22 + 1, 5, "another"), state="COMPLETED")
    assert load_job(job.id) == job


def test_processes_of_a_lost_job_are_killed(state: Path) -> None:
    job = make_job(ourselves()._replace(start=1), state="RUNNING")
    mine = {**os.environ, "SLURM_JOB_ID": str(job.id)}
    sleep = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(60)"]
    with (
        subprocess.Popen(sleep, env=mine, stdout=subprocess.PIPE) as left,
        subprocess.Popen(sleep, env=mine | {"SCALING_LOCAL_STATE": "/other"}, stdout=subprocess.PIPE) as others,
    ):
        for process in (left, others):
            assert process.stdout is not None
            process.stdout.readline()
        load_job(job.id)
        assert left.wait(10) == -9
        assert others.poll() is None
        others.kill()


def test_patterns() -> None:
    job = make_job(ourselves())
    filled = fill_pattern("%x-%j-%5t-%3n-%N-%s-%%t", job, step=4, task=12, node=1)
    assert filled == f"a b-{job.id}-00012-001-127.0.0.2-4-%t"


def test_lists_as_slurm_writes_them() -> None:
    assert format_nodes(["127.0.0.1", "127.0.0.2", "127.0.0.3"]) == "127.0.0.[1-3]"
    assert format_nodes(["127.0.0.1"]) == "127.0.0.1"
    assert format_tasks([2, 2, 2, 1]) == "2(x3),1"
