"""The main job on a machine without Slurm: submit, survive, resume."""

import json
import os
import signal
import subprocess
import time

import pytest

from scaling_slurm.run_directory import read_lines
from tests.support.runs import Run, Workplace


def assert_same(run: Run, other: Run) -> None:
    """Equal to the last bit: losses, evaluations, and the samples of every step."""
    assert run.losses() == other.losses()
    assert run.losses("evaluation") == other.losses("evaluation")
    assert run.samples() == other.samples()


def test_submit_returns_at_once_and_the_run_finishes(uninterrupted: Run):
    run = uninterrupted
    assert list(run.losses()) == list(range(1, 41))
    assert run.losses()[40] < run.losses()[1] - 0.5
    assert list(run.losses("evaluation")) == [10, 20, 30, 40]
    assert run.causes() == ["finished"]
    done = [sample for step in sorted(run.samples()) for sample in run.samples()[step]]
    assert len(done) == 40 * 8
    logs = {path.name for path in run.directory.logs.iterdir()}
    assert logs == {f"job-{run.job_id}.log", *(f"attempt-001-rank-0000{rank}.log" for rank in range(4))}


def test_a_dry_run_shows_the_script_that_is_sent_byte_for_byte(local: Workplace):
    config = local.config()
    shown = local.scaling("submit", config, "--cluster", "local", "--dry-run").stdout
    assert not (local.path / "runs").exists()
    run = local.submit(config)
    script = run.directory.script_file.read_text()
    assert shown.endswith("\n\n" + script)
    assert (run.directory.submitit / f"{run.job_id}_submission.sh").read_text() == script
    local.scaling("cancel", run.directory.id, "--now")


def test_stop_and_resume_change_no_bit(local: Workplace, uninterrupted: Run):
    run = local.submit(local.config(), fault="slow=0.05")
    run.wait_for_step(12)
    local.scaling("cancel", run.job_id)
    run.wait_for_end()
    assert run.causes() == ["stop_file"]
    assert run.last_step() < 40
    assert run.state() == "STOPPED"
    followed = local.scaling("logs", "-f", run.job_id)
    assert "stopped (stop_file)" in followed.stdout
    local.scaling("resume", run.job_id)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == ["stop_file", "finished"]
    assert_same(run, uninterrupted)
    again = local.scaling("resume", run.directory.id)
    assert "is finished: step 40" in again.stderr
    assert len(run.directory.list_attempts()) == 2


def test_killed_ranks_fail_the_job_and_a_resume_changes_no_bit(local: Workplace, uninterrupted: Run):
    run = local.submit(local.config(), fault="slow=0.05")
    run.wait_for_step(25)
    victim = run.find_rank(3)
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    run.wait_for_end(seconds=60)
    assert time.monotonic() - begun < 60
    assert run.state() == "FAILED"
    status = json.loads(local.scaling("status", run.job_id, "--json").stdout)
    assert "was killed by SIGKILL" in status["reason"]
    assert "was killed by SIGKILL" in local.scaling("logs", "-f", run.job_id, code=7).stderr
    assert not run.find_ranks(), "processes are left over"
    local.scaling("resume", run.job_id)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == [None, "finished"]
    assert_same(run, uninterrupted)


def test_sigterm_to_one_rank_alone_requeues_and_changes_no_bit(local: Workplace, uninterrupted: Run):
    run = local.submit(local.config(), fault="slow=0.05")
    run.wait_for_step(15)
    os.kill(run.find_rank(3), signal.SIGTERM)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == ["preempted", "finished"]
    assert [json.loads(a.job_file.read_text())["restart"] for a in run.directory.list_attempts()] == [0, 1]
    assert_same(run, uninterrupted)


@pytest.mark.parametrize(
    "fault", ["import=3", "compile=4 rank=1", "stall=6 rank=2"], ids=["loading", "first step", "data wait"]
)
def test_a_signal_is_honoured_while_loading_compiling_and_waiting_for_data(
    local: Workplace, uninterrupted: Run, fault: str
):
    run = local.submit(local.config(), fault=fault)
    started = run.directory.attempt(1).job_file if fault.startswith("import") else run.directory.attempt(1).start_file
    run.wait(started.exists, 60, "the first attempt")
    if fault.startswith("stall"):
        run.wait_for_step(5)
    time.sleep(1)
    os.kill(run.find_rank(0), signal.SIGTERM)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == ["preempted", "finished"]
    assert_same(run, uninterrupted)


def test_a_rank_that_raises_is_told_apart_from_those_that_lost_it(local: Workplace):
    run = local.submit(local.config(), fault="raise=5 rank=1")
    run.wait_for_end(60)
    report = (run.directory.logs / f"job-{run.job_id}.log").read_text()
    assert "error: rank 1 on" in report
    assert "failed: ValueError: this sample is broken" in report
    assert report.index("ValueError") < report.index("Traceback") < report.index("as a consequence")
    reason = json.loads(local.scaling("status", run.job_id, "--json").stdout)["reason"]
    assert "ValueError: this sample is broken" in reason


def test_runs_that_are_live_are_left_alone(local: Workplace):
    run = local.submit(local.config(), fault="slow=0.2")
    run.wait_for_step(1)
    refused = local.scaling("resume", run.job_id, code=8)
    assert f"{run.directory.id} is live: job {run.job_id} is RUNNING" in refused.stderr
    refused = local.scaling("submit", "tiny.yaml", "--cluster", "local", "--name", run.directory.id, code=8)
    assert "is live" in refused.stderr
    local.scaling("cancel", run.job_id, "--now")
    run.wait_for_end(60)
    assert len(list(read_lines(run.directory.jobs_file))) == 1


def test_training_here_leaves_a_live_job_alone(local: Workplace):
    run = local.submit(local.config(), fault="slow=0.2")
    run.wait_for_step(1)
    refused = local.scaling("train", "tiny.yaml", "--run", run.directory.path, code=8)
    assert "is live" in refused.stderr
    local.scaling("cancel", run.job_id)
    run.wait_for_end(60)
    assert run.causes() == ["stop_file"]
    assert run.state() == "STOPPED"


def test_a_finished_run_that_goes_on_is_finished_no_more(local: Workplace):
    run = local.submit(local.config(), "trainer.num_steps=5")
    run.wait_until_finished()
    run.wait_for_end()
    local.scaling("resume", run.job_id, "trainer.num_steps=100", fault="slow=0.2")
    run.wait_for_step(8)
    os.kill(run.find_rank(3), signal.SIGKILL)
    run.wait_for_end(60)
    assert run.state() == "FAILED"
    local.scaling("logs", "-f", run.job_id, code=7)


def test_resume_takes_other_settings_and_refuses_another_model(local: Workplace):
    run = local.submit(local.config(), "trainer.num_steps=6", "trainer.save_interval=3")
    run.wait_until_finished()
    run.wait_for_end()
    refused = local.scaling("resume", run.job_id, "model.num_layers=3", code=8)
    assert "model of" in refused.stderr
    assert "cannot change" in refused.stderr
    local.scaling("resume", run.job_id, "trainer.num_steps=8")
    run.wait(lambda: run.last_step() == 8, 60, "step 8")
    run.wait_for_end()
    assert list(run.losses()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_moved_run_directory_still_tells_everything(local: Workplace, uninterrupted: Run, tmp_path):
    moved = tmp_path / "elsewhere" / "copy"
    subprocess.run(["mkdir", "-p", moved.parent], check=True)
    subprocess.run(["cp", "-r", uninterrupted.directory.path, moved], check=True)
    assert json.loads(local.scaling("status", moved, "--json").stdout)["state"] == "FINISHED"
    assert "finished after step 40" in local.scaling("logs", moved).stdout
