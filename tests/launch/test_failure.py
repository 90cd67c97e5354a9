import json
import subprocess
import sys

from scaling_slurm.launch.failure import explain
from scaling_slurm.run_directory import Attempt, RunDirectory


def begin(tmp_path) -> tuple[RunDirectory, Attempt]:
    run = RunDirectory(tmp_path)
    attempt = run.claim_attempt()
    run.logs.mkdir()
    attempt.job_file.write_text(json.dumps({"job_id": "42"}))
    return run, attempt


def last_words(attempt: Attempt, rank: int, time: float, error: str, consequence: bool, traceback: str = "") -> None:
    record = {"rank": rank, "host": f"node{rank}", "time": time, "error": error, "consequence": consequence}
    attempt.failure_file(rank).write_text(json.dumps(record | {"traceback": traceback}))


def test_a_killed_rank_is_named_with_host_and_signal(tmp_path):
    run, attempt = begin(tmp_path)
    (run.logs / "job-42.log").write_text(
        "attempt 1 of run\nsrun: error: node02: task 3: Killed\nsrun: error: node01: tasks 0-1: Terminated\n"
    )
    last_words(attempt, 2, 1.0, "RuntimeError: Connection closed by peer [10.0.0.1]", True)
    failure = explain(run, attempt)
    assert failure.headline == "rank 3 on node02 was killed by SIGKILL"
    assert failure.causes == ("rank 3 on node02 was killed by SIGKILL",), "srun's own SIGTERMs are no causes"
    assert failure.consequences == 1


def test_the_rank_that_raised_comes_first_and_the_others_are_consequences(tmp_path):
    run, attempt = begin(tmp_path)
    (run.logs / "job-42.log").write_text("attempt 1 of run\nsrun: error: node1: task 1: Exited with exit code 1\n")
    last_words(attempt, 0, 1.0, "RuntimeError: Connection closed by peer", True, "Traceback 0")
    last_words(attempt, 1, 2.0, "ValueError: bad sample", False, "Traceback 1")
    failure = explain(run, attempt)
    assert failure.describe().splitlines() == [
        "rank 1 on node1 failed: ValueError: bad sample",
        "Traceback 1",
        "1 other rank(s) lost their connection as a consequence",
    ]


def test_only_this_attempts_part_of_the_job_log_counts(tmp_path):
    run, attempt = begin(tmp_path)
    (run.logs / "job-42.log").write_text(
        "attempt 1 of run\nsrun: error: node02: task 3: Killed\n"
        "attempt 2 of run\nsrun: error: node03: task 0: Aborted\n"
    )
    second = run.claim_attempt()
    second.job_file.write_text(json.dumps({"job_id": "42"}))
    assert explain(run, attempt).causes == ("rank 3 on node02 was killed by SIGKILL",)
    assert explain(run, second).causes == ("rank 0 on node03 was killed by SIGABRT",)


def test_out_of_memory_and_rank_lists(tmp_path):
    run, attempt = begin(tmp_path)
    (run.logs / "job-42.log").write_text("srun: error: node7: tasks 1,4-5: Out Of Memory\n")
    assert explain(run, attempt).causes[1] == "rank 4 on node7 was killed by the out-of-memory killer"


def test_nothing_known_is_said_so(tmp_path):
    run, attempt = begin(tmp_path)
    assert explain(run, attempt) is None
    command = [sys.executable, "-m", "scaling_slurm.launch.failure", str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "error: srun failed, but no rank left a word\n"
    assert json.loads(run.events_file.read_text())["event"] == "failed"
    assert explain(run, attempt).headline == "srun failed, but no rank left a word"
    second = run.claim_attempt()
    assert explain(run, second) is None
    last_words(attempt, 1, 1.0, "ValueError: late word", False)
    assert explain(run, attempt).headline == "rank 1 on node1 failed: ValueError: late word"
