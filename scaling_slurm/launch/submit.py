"""Carries out a plan: makes the run directory and sends its script. What a dry run showed is what is sent."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import scaling_slurm
from scaling_slurm.errors import RefusedError
from scaling_slurm.launch.plan import JobPlan
from scaling_slurm.launch.runs import refuse_live, register, slurm_of
from scaling_slurm.launch.worker import run_task
from scaling_slurm.run_directory import RunDirectory, append_line, exclusive, write_atomically
from scaling_slurm.settings import dump_yaml
from scaling_slurm.slurm.executor import send

PATCH_LIMIT_BYTES = 10_000_000


def submit(make_plan: Callable[[], JobPlan]) -> tuple[JobPlan, str]:
    """Start a new run; returns the plan that was carried out and the job id. A refusal leaves no run behind.

    Args:
        make_plan: Called again when another submitter has taken the run's number in the meantime.
    """
    taken: Path | None = None
    while True:
        plan = make_plan()
        run = RunDirectory(plan.run_directory)
        if run.path == taken:
            refuse_existing(run)
        refuse_problems(plan)
        slurm_of(plan.cluster).test_only(plan.script)
        run.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.path.mkdir()
        except FileExistsError:
            taken = run.path
            continue
        try:
            with exclusive(run, "submit"):
                return plan, carry_out(plan, run)
        except BaseException:
            if not run.jobs_file.exists():
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def refuse_problems(plan: JobPlan) -> None:
    """Raises the first of what stands in the way."""
    for problem in (*plan.problems, *plan.obstacles):
        raise problem


def carry_out(plan: JobPlan, run: RunDirectory) -> str:
    """Write the plan into an existing run directory, held by exclusive(run, "submit"), and send its script.

    Returns the job id.
    """
    for folder in (run.logs, run.attempts, run.checkpoints, run.submitit):
        folder.mkdir(exist_ok=True)
    write_atomically(run.config_file, dump_yaml(plan.config))
    write_atomically(run.cluster_file, dump_yaml(plan.cluster))
    write_atomically(run.script_file, plan.script)
    record_code(run)
    job_id = send(
        run.submitit,
        plan.script,
        plan.command,
        run_task,
        str(run.path),
        nodes=plan.request.nodes,
        tasks_per_node=plan.request.tasks_per_node,
        time_minutes=plan.request.time.minutes if plan.request.time else None,
        path_prefix=slurm_of(plan.cluster).path_prefix,
    )
    record = {"job_id": job_id, "cluster": plan.cluster.name, "time": time.time()}
    kept = {"account": plan.request.account, "partition": plan.request.partition}
    try:
        append_line(run.jobs_file, record | kept)
    except OSError:
        # A job that its run does not know could be sent a second time.
        slurm_of(plan.cluster).cancel(job_id)
        raise
    register(job_id, plan.cluster.name, run)
    run.record_event("submitted", job_id=job_id, cluster=plan.cluster.name)
    return job_id


def record_code(run: RunDirectory) -> None:
    """The state of the code that will run: version, and for a checkout its commit and uncommitted changes."""
    root = Path(scaling_slurm.__file__).resolve().parent.parent
    record: dict[str, object] = {"version": scaling_slurm.__version__, "path": str(root)}
    if (root / ".git").exists():
        record["commit"] = _git(root, "rev-parse", "HEAD").strip()
        record["branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
        record["untracked"] = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()[:1000]
        patch = _git(root, "diff", "HEAD")
        if len(patch) <= PATCH_LIMIT_BYTES:
            write_atomically(run.code_patch, patch)
        else:
            record["patch"] = f"left out: {len(patch)} bytes"
    write_atomically(run.code_file, json.dumps(record, indent=1))


def _git(root: Path, *arguments: str) -> str:
    """git's answer, or nothing where there is no git or no commit yet."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def refuse_existing(run: RunDirectory) -> NoReturn:
    """Raises RefusedError for a name that another run has, which may even be live."""
    if run.config_file.exists():
        refuse_live(run)
    raise RefusedError(
        f"the run {run.id} exists already in {run.path.parent}",
        f"`scaling resume {run.id}` continues it",
        "--name, to start another one",
    )
