"""Logs of a run, as files and as they grow."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling_slurm.errors import JobFailedError, NotFoundError
from scaling_slurm.launch import watch
from scaling_slurm.launch.watch import find_log, follow, rank_log
from scaling_slurm.run_directory import RunDirectory
from tests.support.run_records import add_attempt, add_failure, add_job, end_attempt, let_scheduler_know, make_run
from tests.support.slurm import wait_until

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the scheduler says of each job; asked at once and often."""
    monkeypatch.setattr(watch, "READ_SECONDS", 0.01)
    states = {"7": "RUNNING"}
    let_scheduler_know(monkeypatch, states)
    return states


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = make_run(tmp_path)
    add_job(run, "7")
    return run


def collect(texts: Iterator[str], into: list[str]) -> threading.Thread:
    """Read in the background, as a terminal would."""

    def read() -> None:
        try:
            into.extend(texts)
        except JobFailedError as error:
            into.append(f"error: {error}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


# Files


def test_a_log_of_any_attempt_and_rank(run: RunDirectory):
    add_attempt(run, "7", "preempted", "one")
    add_attempt(run, "7", "finished", "two")
    (run.logs / "attempt-001-rank-00003.log").write_text("three")
    assert find_log(run, None, 0).read_text() == "two"
    assert find_log(run, 1, 3).read_text() == "three"
    with pytest.raises(NotFoundError, match=r"no log of attempt 2, rank 3; there is: attempt-001-rank-00000.log, att"):
        find_log(run, 2, 3)


def test_with_many_ranks_a_node_has_a_log(run: RunDirectory):
    for node in (1, 0):
        (run.logs / f"attempt-001-node-0000{node}.log").touch()
    path = rank_log(run, 1, 0)
    assert path is not None
    assert path.name == "attempt-001-node-00000.log"
    assert rank_log(run, 2, 0) is None


def test_a_run_that_has_not_started(run: RunDirectory, states: dict[str, str], tmp_path: Path):
    states["7"] = "PENDING"
    with pytest.raises(NotFoundError, match="small-1 has not started yet: it is PENDING; `scaling logs -f` waits"):
        find_log(run, None, 0)
    with pytest.raises(NotFoundError, match="it is not submitted"):
        find_log(make_run(tmp_path, "other"), None, 0)


# Following


def test_followed_over_a_requeue_until_the_end(run: RunDirectory, states: dict[str, str]):
    states["7"] = "PENDING"
    texts: list[str] = []
    reader = collect(follow(run, 0), texts)
    states["7"] = "RUNNING"
    first = add_attempt(run, "7", log="step 1\nste")
    wait_until(lambda: texts, "the first line")
    time.sleep(0.05)
    assert "".join(texts) == "step 1\n", "a line comes whole"
    with open(run.logs / "attempt-001-rank-00000.log", "a") as log:
        log.write("p 2\n")
    end_attempt(first, "preempted", requeue=True)
    wait_until(lambda: "step 2" in "".join(texts), "the second line")
    assert reader.is_alive()
    second = add_attempt(run, "7", log="step 3\n")
    states["7"] = "COMPLETED"
    run.finished_file.write_text('{"step": 10}')
    end_attempt(second, "finished")
    reader.join(timeout=10)
    assert "".join(texts) == "step 1\nstep 2\n--- attempt 2\nstep 3\n"


def test_only_the_newest_attempt_is_followed(run: RunDirectory, states: dict[str, str]):
    add_attempt(run, "6", "preempted", "old\n")
    add_attempt(run, "7", "stop_file", "new\n")
    states["7"] = "COMPLETED"
    assert "".join(follow(run, 0)) == "new\n"


def test_after_a_resume_the_next_attempt_is_waited_for(run: RunDirectory, states: dict[str, str]):
    add_attempt(run, "6", "stop_file", "old\n")
    texts: list[str] = []
    reader = collect(follow(run, 0), texts)
    time.sleep(0.1)
    assert (texts, reader.is_alive()) == ([], True)
    states["7"] = "CANCELLED"
    end_attempt(add_attempt(run, "7", log="new\n"), "cancelled")
    reader.join(timeout=10)
    assert "".join(texts) == "new\n"


@pytest.mark.parametrize(
    ("state", "says"), [("FAILED", "rank 1 on node1 failed: ValueError: bad"), ("TIMEOUT", "is TIMEOUT")]
)
def test_a_failure_ends_with_its_cause_in_one_line(run: RunDirectory, states: dict[str, str], state: str, says: str):
    attempt = add_attempt(run, "7", log="step 1\n")
    add_failure(attempt, 1, "ValueError: bad")
    add_failure(attempt, 2, "KeyError: worse")
    states["7"] = state
    with pytest.raises(JobFailedError) as failed:
        list(follow(run, 0))
    assert says in str(failed.value)
    assert f"logs in {run.logs}; `scaling resume small-1` continues" in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_job_that_never_started_a_rank(run: RunDirectory, states: dict[str, str]):
    states["7"] = "BOOT_FAIL"
    with pytest.raises(JobFailedError, match="small-1 is BOOT_FAIL: Priority"):
        list(follow(run, 0))


def test_the_scheduler_is_asked_as_seldom_as_the_site_wants(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "READ_SECONDS", 0.01)
    asked = let_scheduler_know(monkeypatch, {"7": "RUNNING"})
    attempt = add_attempt(run, "7", log="step 1\n")
    reader = collect(follow(run, 0), [])
    time.sleep(0.6)
    assert len(asked) <= 2, "poll_seconds is 1 here"
    let_scheduler_know(monkeypatch, {"7": "COMPLETED"})
    end_attempt(attempt, "stop_file")
    reader.join(timeout=10)
    assert not reader.is_alive()
