import json

import pytest

from scaling_slurm.core.config import RequeueConfig
from scaling_slurm.core.trainer.preemption import StopCause
from scaling_slurm.errors import RefusedError
from scaling_slurm.launch.requeue import check_progress, classify, decide
from scaling_slurm.run_directory import RunDirectory


def add_attempt(run: RunDirectory, job_id: str = "7", step: int | None = None, cause: str | None = None):
    attempt = run.claim_attempt()
    attempt.job_file.write_text(json.dumps({"job_id": job_id}))
    if step is not None:
        attempt.start_file.write_text(json.dumps({"step": step}))
    if cause is not None:
        attempt.end_file.write_text(json.dumps({"cause": cause, "step": step}))
    return attempt


@pytest.mark.parametrize(
    ("stopped_by", "seconds_left", "is_ending", "cause"),
    [
        (StopCause.NONE, 10.0, False, "finished"),
        (StopCause.NONE, None, True, "finished"),
        (StopCause.SIGNAL, 3600.0, False, "preempted"),
        (StopCause.SIGNAL, None, False, "preempted"),
        (StopCause.SIGNAL, 120.0, False, "time_limit"),
        (StopCause.DEADLINE, 3600.0, False, "time_limit"),
        (StopCause.STOP_FILE, 3600.0, False, "stop_file"),
        (StopCause.SIGNAL, 3600.0, True, "cancelled"),
        (StopCause.SIGNAL, None, True, "cancelled"),
        (StopCause.SIGNAL, 10.0, True, "time_limit"),
        (StopCause.STOP_FILE, 3600.0, True, "stop_file"),
    ],
)
def test_the_time_left_tells_a_time_limit_from_a_preemption(stopped_by, seconds_left, is_ending, cause):
    assert classify(stopped_by, seconds_left, lead_seconds=60, is_ending=is_ending) == cause


@pytest.mark.parametrize(
    ("cause", "requeue"),
    [("finished", False), ("stop_file", False), ("cancelled", False), ("preempted", True), ("time_limit", True)],
)
def test_only_interruptions_are_requeued(tmp_path, cause, requeue):
    run = RunDirectory(tmp_path)
    assert decide(cause, run, run.claim_attempt(), RequeueConfig(), in_job=True).requeue is requeue


def test_requeues_are_counted_per_cause(tmp_path):
    run = RunDirectory(tmp_path)
    for cause in ("preempted", "time_limit", "preempted"):
        add_attempt(run, cause=cause, step=1)
    current = run.claim_attempt()
    assert not decide("preempted", run, current, RequeueConfig(max_preemptions=2), in_job=True).requeue
    assert decide("preempted", run, current, RequeueConfig(max_preemptions=3), in_job=True).requeue
    assert decide("time_limit", run, current, RequeueConfig(max_preemptions=2), in_job=True).requeue
    refusal = decide("time_limit", run, current, RequeueConfig(max_timeouts=1), in_job=True)
    assert refusal.reason == "time_limit 2 times; trainer.requeue.max_timeouts is 1"


def test_outside_of_a_job_and_when_switched_off_nothing_is_requeued(tmp_path):
    run = RunDirectory(tmp_path)
    attempt = run.claim_attempt()
    assert not decide("preempted", run, attempt, RequeueConfig(), in_job=False).requeue
    assert not decide("preempted", run, attempt, RequeueConfig(enabled=False), in_job=True).requeue


def test_attempts_without_progress_end_the_loop(tmp_path):
    run, config = RunDirectory(tmp_path), RequeueConfig(max_without_progress=2)
    add_attempt(run, step=0, cause="time_limit")
    add_attempt(run, step=10, cause="time_limit")
    check_progress(run, run.attempt(99), config, "7", step=20)
    check_progress(run, run.attempt(99), config, "7", step=10)
    add_attempt(run, step=10, cause="time_limit")
    with pytest.raises(RefusedError, match="2 attempts of job 7 in a row ended at step 10"):
        check_progress(run, run.attempt(99), config, "7", step=10)
    check_progress(run, run.attempt(99), config, "8", step=10)  # `scaling resume` sends a new job


def test_attempts_that_died_while_loading_count_as_without_progress(tmp_path):
    run = RunDirectory(tmp_path)
    add_attempt(run)
    add_attempt(run)
    with pytest.raises(RefusedError, match="without a new checkpoint"):
        check_progress(run, run.attempt(99), RequeueConfig(max_without_progress=2), "7", step=0)


def test_lost_attempts_are_bounded(tmp_path):
    run, config = RunDirectory(tmp_path), RequeueConfig(max_node_failures=2)
    for step in (0, 10):
        add_attempt(run, step=step)
    check_progress(run, run.attempt(99), config, "7", step=20)
    add_attempt(run, step=20)
    with pytest.raises(RefusedError, match="3 attempts of job 7 ended without a word"):
        check_progress(run, run.attempt(99), config, "7", step=30)


def test_preemptions_while_loading_do_not_end_the_run(tmp_path):
    run = RunDirectory(tmp_path)
    for _ in range(5):
        add_attempt(run, step=10, cause="preempted")
    check_progress(run, run.attempt(99), RequeueConfig(max_without_progress=2), "7", step=10)
