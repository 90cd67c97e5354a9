"""Continues a run with a new job: the same directory, the resolved settings of its last start, changes on top."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaling_slurm.errors import ConfigError
from scaling_slurm.launch.plan import JobPlan, plan
from scaling_slurm.launch.runs import last_job, refuse_live, slurm_of
from scaling_slurm.launch.submit import carry_out, refuse_problems
from scaling_slurm.run_directory import RunDirectory, exclusive, read_json
from scaling_slurm.settings import load_settings
from scaling_slurm.slurm.cluster import Directive, load_cluster
from scaling_slurm.transformer.config import RunConfig, refuse_another_model


@dataclass(frozen=True)
class Changes:
    """What the command line asks to be different from the last start."""

    overrides: Sequence[str] = ()
    cluster: str | None = None
    account: str | None = None
    partition: str | None = None
    directives: Mapping[str, Directive | None] | None = None


def plan_resume(run: RunDirectory, changes: Changes) -> JobPlan:
    """The next job of a run; raises RefusedError for changes that its checkpoints cannot follow."""
    if changes.cluster is None and not run.cluster_file.exists():
        raise ConfigError(
            f"{run.id} was trained here, not submitted",
            "`scaling train CONFIG --run DIRECTORY` continues it, or a job on the cluster that --cluster names",
        )
    before = load_settings(RunConfig, run.config_file).value
    config = load_settings(RunConfig, run.config_file, overrides=changes.overrides)
    refuse_another_model(before, config.value, run.id)
    cluster = load_cluster(changes.cluster or str(run.cluster_file), directives=changes.directives)
    before_job = (last_job(run) or {}) if changes.cluster is None else {}
    return plan(
        config,
        cluster,
        runs_root=run.path.parent,
        account=changes.account or before_job.get("account"),
        partition=changes.partition or before_job.get("partition"),
        run_id=run.id,
    )


def resume(run: RunDirectory, changes: Changes) -> tuple[JobPlan, str]:
    """Send the next job; returns its plan and id. Raises RefusedError while a job of the run is live."""
    with exclusive(run, "submit"):  # of two at once, the second one sees the first one's job
        refuse_live(run)
        job = plan_resume(run, changes)
        refuse_problems(job)
        slurm_of(job.cluster).test_only(job.script)
        run.stop_file.unlink(missing_ok=True)
        return job, carry_out(job, run)


def is_finished(run: RunDirectory, config: RunConfig) -> bool:
    """Whether the last step of these settings is in a checkpoint."""
    record = read_json(run.finished_file)
    return record is not None and int(record["step"]) >= config.trainer.num_steps
