"""Run directories written by hand, and a scheduler that says what a test wants it to say."""

import json
from pathlib import Path

import pytest

from scaling_slurm.run_directory import Attempt, RunDirectory, append_line
from scaling_slurm.settings import dump_yaml
from scaling_slurm.slurm.cluster import load_cluster
from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.job_info import JobInfo
from tests.support.plans import load_run


def make_run(folder: Path, name: str = "small-1", *overrides: str, cluster: str = "local") -> RunDirectory:
    """folder/runs/name with its settings, as if it had been submitted; without a job."""
    run = RunDirectory(folder / "runs" / name)
    run.logs.mkdir(parents=True)
    changed = ("allocation.nodes=1", "allocation.tasks_per_node=1", *overrides)
    run.config_file.write_text(dump_yaml(load_run(folder, *changed).value))
    run.cluster_file.write_text(dump_yaml(load_cluster(cluster).value))
    return run


def add_job(run: RunDirectory, job_id: str, **fields: object) -> None:
    append_line(run.jobs_file, {"job_id": job_id, "cluster": "local"} | fields)


def add_attempt(
    run: RunDirectory, job_id: str, cause: str | None = None, log: str = "", requeue: bool = False
) -> Attempt:
    """An attempt with the log of rank 0; without a cause it is still going on, or was lost."""
    attempt = run.claim_attempt()
    attempt.job_file.write_text(json.dumps({"job_id": job_id}))
    (run.logs / f"attempt-{attempt.number:03d}-rank-00000.log").write_text(log)
    if cause is not None:
        end_attempt(attempt, cause, requeue)
    return attempt


def end_attempt(attempt: Attempt, cause: str, requeue: bool = False) -> None:
    attempt.end_file.write_text(json.dumps({"cause": cause, "step": 3, "requeue": requeue, "reason": ""}))


def add_failure(attempt: Attempt, rank: int, error: str) -> None:
    record = {
        "rank": rank,
        "host": "node1",
        "time": float(rank),
        "error": error,
        "consequence": False,
        "traceback": "...",
    }
    attempt.failure_file(rank).write_text(json.dumps(record))


def let_scheduler_know(patch: pytest.MonkeyPatch, states: dict[str, str]) -> list[list[str]]:
    """Each job and its state; `states` may change later. Returns the questions as they come."""
    asked: list[list[str]] = []

    def jobs(self: Slurm, job_ids: list[str]) -> dict[str, JobInfo]:
        asked.append(list(job_ids))
        return {one: JobInfo(one, states[one], "squeue", "Priority") for one in job_ids if one in states}

    patch.setattr(Slurm, "jobs", jobs)
    return asked
