"""The main job on a real Slurm of several nodes: preempted, at its time limit, with lost nodes, cancelled, killed.

All runs train on 2 nodes x 2 ranks and must equal the uninterrupted run to the last bit.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
from scaling_slurm.run_directory import read_json
from tests.end_to_end.test_local import assert_same
from tests.support.runs import Run, Workplace
from tests.support.slurm_lab import SlurmLab

pytestmark = pytest.mark.slurm


def hosts_of(lab: SlurmLab, run: Run) -> list[str]:
    """Names of the nodes that the run's job has now."""
    listed = lab.run("squeue", "--noheader", f"--jobs={run.job_id}", "--format=%N").strip()
    return lab.run("scontrol", "show", "hostnames", listed).split()


def start_now(lab: SlurmLab, run: Run) -> None:
    """Lift the hold of a requeued job, which is minutes long on other clusters and seconds here."""
    lab.run("scontrol", "update", f"job={run.job_id}", "StartTime=now", check=False)


def submit(lab: Workplace, *options: str, fault: str = "slow=0.05", time: str = "30:00") -> Run:
    return lab.submit(lab.config(time=time), *options, fault=fault)


def test_two_nodes_with_two_ranks_each_train(on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab):
    shown = on_lab.scaling("submit", on_lab.config(), "--cluster", on_lab.cluster, "--dry-run").stdout
    run = submit(on_lab, fault="")
    assert shown.endswith("\n\n" + run.directory.script_file.read_text()), "what is shown is what is sent"
    sent = lab_script(slurm_lab, run)
    assert sent == run.directory.script_file.read_text()
    run.wait_until_finished()
    run.wait_for_end()
    assert_same(run, uninterrupted)
    hosts = {read_json(run.directory.attempt(1).job_file)["host"]}
    assert hosts == {"node01"} or not slurm_lab.saved["namespaces"]
    text = "\n".join(path.read_text() for path in run.directory.logs.glob("attempt-*-rank-*.log"))
    assert "hostname=node02" in text or not slurm_lab.saved["namespaces"]


def lab_script(lab: SlurmLab, run: Run) -> str:
    """The script as Slurm's controller keeps it."""
    return lab.run("scontrol", "write", "batch_script", run.job_id, "-")


def test_preempted_by_a_job_of_higher_priority(on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab):
    run = submit(on_lab, "--partition", "low", "--sbatch", "exclusive")
    run.wait_for_step(12)
    preemptor = ["sbatch", "--parsable", "--partition=normal", "--nodes=4", "--exclusive", "--output=/dev/null"]
    slurm_lab.run(*preemptor, "--wrap", "sleep 3")
    run.wait(lambda: run.causes() == ["preempted"], 60, "the preemption")
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == ["preempted", "finished"]
    jobs = [read_json(attempt.job_file) for attempt in run.directory.list_attempts()]
    assert [(job["job_id"], job["restart"]) for job in jobs] == [(run.job_id, 0), (run.job_id, 1)]
    assert_same(run, uninterrupted)


def test_time_limit(on_lab: Workplace, uninterrupted: Run):
    """A real wait: Slurm warns at a tick of its own, up to a minute before the limit."""
    run = submit(on_lab, "trainer.requeue.max_timeouts=20", fault="slow=1", time="1:00")
    run.wait(lambda: run.causes()[:1] == ["time_limit"], 120, "the warning")
    assert 0 < run.last_step() < 40
    run.wait_until_finished(300)
    run.wait_for_end()
    assert set(run.causes()) == {"time_limit", "finished"}
    assert_same(run, uninterrupted)


def test_a_lost_node(on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab):
    run = submit(on_lab)
    run.wait_for_step(12)
    lost = hosts_of(slurm_lab, run)[1]
    slurm_lab.power_off(lost)
    slurm_lab.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
    try:
        run.wait_until_finished()
        run.wait_for_end()
    finally:
        slurm_lab.boot(lost)
    assert run.causes() == [None, "finished"]
    events = [json.loads(line) for line in run.directory.events_file.read_text().splitlines()]
    assert [event["attempt"] for event in events if event["event"] == "lost"] == [1]
    assert_same(run, uninterrupted)


def test_a_cut_link_leaves_an_old_writer_that_may_not_write(on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab):
    if not slurm_lab.saved["namespaces"]:
        pytest.skip("links can only be cut where nodes are network namespaces")
    run = submit(on_lab, fault="slow=0.2")
    run.wait_for_step(12)
    cut = hosts_of(slurm_lab, run)[0]  # rank 0 lives there, which commits checkpoints
    slurm_lab.cut(cut)
    try:
        run.wait(lambda: len(run.directory.list_attempts()) == 2, 90, "the second attempt")
        run.wait_until_finished(180)
        time.sleep(3)
    finally:
        slurm_lab.heal(cut)
    run.wait_for_end()
    newest = CheckpointDirectory(run.directory.checkpoints).committed()[0]
    assert newest.attempt == 2
    assert (run.directory.checkpoints / "latest").read_text().strip() == newest.name
    assert not list(run.directory.checkpoints.glob(".tmp-*"))
    assert_same(run, uninterrupted)


def test_scancel_then_resume(on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab):
    run = submit(on_lab)
    run.wait_for_step(12)
    slurm_lab.run("scancel", run.job_id)
    run.wait_for_end()
    assert run.state() == "STOPPED"
    time.sleep(3)
    assert "JobState=CANCELLED" in slurm_lab.run("scontrol", "show", "job", run.job_id), "it must not come back"
    done = on_lab.scaling("resume", run.job_id, "-q").stdout.strip()
    assert done != run.job_id
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes()[-1] == "finished"
    assert_same(run, uninterrupted)


def test_cancelled_between_the_save_and_the_requeue_it_does_not_come_back(on_lab: Workplace, slurm_lab: SlurmLab):
    """Slurm would requeue a job that is being cancelled, if somebody asked."""
    run = submit(on_lab, fault="slow=0.05 end=3")
    run.wait_for_step(5)
    slurm_lab.run("scancel", "--signal=USR2", run.job_id)
    run.wait(run.directory.attempt(1).end_file.exists, 30, "the end of the attempt")
    slurm_lab.run("scancel", run.job_id)
    run.wait_for_end()
    time.sleep(10)
    assert run.state() == "CANCELLED"
    assert len(run.directory.list_attempts()) == 1


def test_a_signal_before_the_ranks_listen_does_not_end_the_run(on_lab: Workplace, slurm_lab: SlurmLab):
    run = submit(on_lab, "trainer.num_steps=6", fault="start=4")
    run.wait(lambda: run.directory.list_attempts(), 30, "the first attempt")
    time.sleep(1.5)
    for name in ("USR2", "TERM"):
        slurm_lab.run("scancel", f"--signal={name}", run.job_id)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.state() == "FINISHED"


@pytest.mark.parametrize("how", ["--full", "--batch"])
def test_a_warning_to_the_job_script_does_not_end_the_run(
    on_lab: Workplace, uninterrupted: Run, slurm_lab: SlurmLab, how: str
):
    run = submit(on_lab)
    run.wait_for_step(12)
    slurm_lab.run("scancel", how, "--signal=USR2", run.job_id)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == (["preempted", "finished"] if how == "--full" else ["finished"])
    assert_same(run, uninterrupted)


def test_a_rank_killed_by_a_signal_is_named(on_lab: Workplace, slurm_lab: SlurmLab):
    run = submit(on_lab, fault="slow=0.2")
    run.wait_for_step(5)
    begun = time.monotonic()
    os.kill(run.find_rank(3), signal.SIGKILL)
    run.wait_for_end(60)
    assert time.monotonic() - begun < 60
    host = "node02" if slurm_lab.saved["namespaces"] else "127.0.0.2"
    log = (run.directory.logs / f"job-{run.job_id}.log").read_text()
    assert "was killed by SIGKILL" in log
    assert f"rank 3 on {hosts_named(log)} was killed by SIGKILL" in log
    assert hosts_named(log).startswith(host[:4])
    status = json.loads(on_lab.scaling("status", run.job_id, "--json").stdout)
    assert (status["state"], "SIGKILL" in status["reason"]) == ("FAILED", True)


def hosts_named(log: str) -> str:
    return log.partition("error: rank 3 on ")[2].split()[0]


def test_a_rank_that_raises_comes_first(on_lab: Workplace):
    run = submit(on_lab, fault="raise=5 rank=1")
    run.wait_for_end(60)
    log = (run.directory.logs / f"job-{run.job_id}.log").read_text()
    assert "failed: ValueError: this sample is broken" in log
    assert log.index("ValueError: this sample is broken") < log.index("as a consequence")
    assert "error: rank 1 on node01 failed" in log or "error: rank 1 on" in log


def test_without_scontrol_for_the_ranks_the_job_script_requeues(on_lab: Workplace, uninterrupted: Run, tmp_path: Path):
    """As in a container: the ranks' PATH has no Slurm, the batch host's has."""
    profile = tmp_path / "bare.yaml"
    wrapper = tmp_path / "python-without-slurm"
    wrapper.write_text(f'#!/bin/sh\nPATH={tmp_path} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    profile.write_text(Path(on_lab.cluster).read_text().replace("name: lab", "name: bare") + f"python: {wrapper}\n")
    bare = Workplace(on_lab.path, on_lab.data, str(profile), on_lab.environment)
    run = submit(bare)
    run.wait_for_step(12)
    os.kill(run.find_rank(2), signal.SIGTERM)
    run.wait_until_finished()
    run.wait_for_end()
    assert run.causes() == ["preempted", "finished"]
    assert "time limit is not known here" in (run.directory.logs / "attempt-001-rank-00000.log").read_text()
    assert_same(run, uninterrupted)


def test_what_slurm_refuses_leaves_no_run_behind(on_lab: Workplace):
    before = set((on_lab.path / "runs").glob("*"))
    config = on_lab.config()
    refused = on_lab.scaling("submit", config, "--cluster", on_lab.cluster, "--sbatch", "constraint=nothere", code=4)
    assert "Slurm refused the job" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    away_conf = on_lab.path / "away.conf"
    away_conf.write_text(
        re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", Path(on_lab.environment["SLURM_CONF"]).read_text())
    )
    away = Workplace(on_lab.path, on_lab.data, on_lab.cluster, on_lab.environment | {"SLURM_CONF": str(away_conf)})
    unreachable = away.scaling("submit", config, "--cluster", on_lab.cluster, code=5)
    assert "Slurm" in unreachable.stderr
    assert len(unreachable.stderr.strip().splitlines()) == 1
    assert set((on_lab.path / "runs").glob("*")) == before
