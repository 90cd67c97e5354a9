"""Finds runs by directory, name or job id, and says how they are. Asks each scheduler in one call.

The registry (a line for each job, in the user's state directory) is a convenience: everything works without it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_slurm.errors import ConfigError, NotFoundError, RefusedError, SchedulerUnreachableError
from scaling_slurm.launch.failure import explain
from scaling_slurm.run_directory import RunDirectory, append_line, read_json, read_lines
from scaling_slurm.settings import load_settings
from scaling_slurm.slurm.cluster import ClusterProfile
from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.job_info import FINISHED, JobInfo
from scaling_slurm.slurm.local_scheduler.programs import install_programs

NOT_LIVE = FINISHED | {"FINISHED", "STOPPED", "UNKNOWN"}
"""States of a run that has no job any more; a state of Slurm's that we do not know counts as live."""


RECENT_STEPS = 20
ENDS = {"stop_file": "on request", "cancelled": "its job was cancelled", "time_limit": "time limit"}
"""How an attempt ended, for people."""


def runs_root(option: Path | None, cluster: ClusterProfile | None = None) -> Path:
    """Where new runs go: --runs, $SCALING_RUNS, the profile's runs_directory, else ./runs."""
    if option is not None:
        return option.absolute()
    if named := os.environ.get("SCALING_RUNS"):
        return Path(named).absolute()
    if cluster is not None and cluster.runs_directory is not None:
        text = os.path.expandvars(cluster.runs_directory)
        if "$" in text:
            raise ConfigError(
                f"runs_directory {cluster.runs_directory} holds a variable that is not set",
                "export it, or name a folder with --runs",
                f"runs_directory in the profile of {cluster.name}",
            )
        return Path(text).expanduser().absolute()
    return Path("runs").absolute()


def registry_file() -> Path:
    """One line for each job this user has sent."""
    state = os.environ.get("SCALING_HOME") or Path(os.environ.get("XDG_STATE_HOME", "~/.local/state"), "scaling")
    return Path(state).expanduser() / "jobs.jsonl"


def register(job_id: str, cluster: str, run: RunDirectory) -> None:
    """Remember where a job's run lies; never fails, since home directories fill up."""
    try:
        registry_file().parent.mkdir(parents=True, exist_ok=True)
        append_line(registry_file(), {"job_id": job_id, "cluster": cluster, "run": str(run.path)})
    except OSError:
        return


def list_runs(root: Path) -> list[RunDirectory]:
    """The runs under one root, oldest first."""
    if not root.is_dir():
        return []
    found = [RunDirectory(entry) for entry in root.iterdir() if (entry / "config.yaml").is_file()]
    return sorted(found, key=lambda run: (run.config_file.stat().st_mtime_ns, run.id))


def find_run(token: str, root: Path | None = None) -> RunDirectory:
    """A run by its directory, its id, or the id of one of its jobs; raises NotFoundError."""
    root = root or runs_root(None)
    if "/" in token or (Path(token) / "config.yaml").is_file():
        return RunDirectory.open(token)
    if (root / token / "config.yaml").is_file():
        return RunDirectory.open(root / token)
    known = [record for record in read_lines(registry_file()) if Path(str(record.get("run"))).is_dir()]
    for record in reversed(known):
        if token in (record.get("job_id"), Path(str(record["run"])).name):
            return RunDirectory.open(str(record["run"]))
    for run in reversed(list_runs(root)):
        if any(job["job_id"] == token for job in read_lines(run.jobs_file)):
            return run
    names = ", ".join(run.id for run in list_runs(root)[-3:])
    raise NotFoundError(
        f"no run or job {token!r} under {root}",
        f"the newest ones there: {names}" if names else "there are no runs there",
        "--runs or SCALING_RUNS names another place; a run's directory works too",
    )


def load_cluster_of(run: RunDirectory) -> ClusterProfile:
    """The profile that the run was sent with."""
    return load_settings(ClusterProfile, run.cluster_file).value


def slurm_of(cluster: ClusterProfile) -> Slurm:
    """The scheduler of a cluster: Slurm's commands, or our stand-in's in front of them."""
    return Slurm(install_programs() if cluster.scheduler == "local" else None)


def last_job(run: RunDirectory) -> dict[str, Any] | None:
    """The newest job that was sent for the run."""
    return next(reversed(list(read_lines(run.jobs_file))), None)


@dataclass(frozen=True)
class RunStatus:
    """One line of `scaling status`."""

    run: RunDirectory
    job_id: str
    state: str
    """Slurm's word; FINISHED once the last step is in a checkpoint; STOPPED if it saved and left in order before that;
    UNKNOWN where nobody can tell."""
    step: int
    num_steps: int
    loss: float | None
    """Of the last step."""
    tokens_per_second: float | None
    """Over the last steps."""
    attempts: int
    reason: str

    @property
    def is_live(self) -> bool:
        return self.state not in NOT_LIVE


def status_of(runs: Sequence[RunDirectory]) -> list[RunStatus]:
    """The state of several runs, with one query a scheduler."""
    jobs = {run.path: last_job(run) for run in runs}
    infos: dict[Path, JobInfo | None] = {}
    unreachable: set[Path] = set()
    by_scheduler: dict[str, list[RunDirectory]] = {}
    for run in runs:
        if jobs[run.path] is not None:
            by_scheduler.setdefault(load_cluster_of(run).scheduler, []).append(run)
    for group in by_scheduler.values():
        slurm = slurm_of(load_cluster_of(group[0]))
        try:
            answers = slurm.jobs([str((jobs[run.path] or {})["job_id"]) for run in group])
        except SchedulerUnreachableError:
            unreachable.update(run.path for run in group)
            continue
        infos.update({run.path: answers.get(str((jobs[run.path] or {})["job_id"])) for run in group})
    return [_status(run, jobs[run.path], infos.get(run.path), run.path in unreachable) for run in runs]


def _status(run: RunDirectory, job: dict[str, Any] | None, info: JobInfo | None, unreachable: bool) -> RunStatus:
    from scaling_slurm.transformer.config import RunConfig

    config = load_settings(RunConfig, run.config_file).value
    records = [record for record in read_lines(run.metrics_file) if record.get("kind") == "training"]
    last = records[-1] if records else {}
    recent = records[-RECENT_STEPS:]
    seconds = sum(record.get("step_seconds", 0.0) for record in recent)
    attempts = run.list_attempts()
    end = read_json(attempts[-1].end_file) if attempts else None
    has_ended = info is None or not info.is_live
    reason = ""
    finished = read_json(run.finished_file)
    if finished is not None and finished["step"] >= config.trainer.num_steps and has_ended:
        state = "FINISHED"
    elif has_ended and end is not None and not end["requeue"]:
        state, reason = "STOPPED", f"{ENDS.get(end['cause'], end['cause'])}; `scaling resume` continues it"
    elif info is not None:
        state, reason = info.state, info.reason or ""
    elif job is None:
        state, reason = "UNKNOWN", "started by `scaling train`, not by a scheduler"
    else:
        state = "UNKNOWN"
        reason = "the scheduler cannot be reached" if unreachable else "the scheduler no longer knows the job"
    if attempts and state in NOT_LIVE - {"FINISHED", "STOPPED"} and (failure := explain(run, attempts[-1])):
        reason = failure.headline
    return RunStatus(
        run,
        str(job["job_id"]) if job else "",
        state,
        int(last.get("step", 0)),
        config.trainer.num_steps,
        last.get("loss"),
        sum(record.get("tokens", 0.0) for record in recent) / seconds if seconds else None,
        len(attempts),
        reason,
    )


def refuse_live(run: RunDirectory) -> None:
    """Raises RefusedError while a job of the run is queued or running, SchedulerUnreachableError if nobody can tell."""
    job = last_job(run)
    info = slurm_of(load_cluster_of(run)).job(str(job["job_id"])) if job else None
    if info is not None and info.is_live:
        raise RefusedError(
            f"{run.id} is live: job {info.job_id} is {info.state}",
            f"`scaling logs -f {run.id}` follows it, `scaling cancel {run.id}` ends it",
        )
