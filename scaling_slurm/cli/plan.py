"""`scaling plan`: shows what a submission would do, and sends nothing. Also how the options of one become a plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scaling_slurm.cli import options

if TYPE_CHECKING:
    from scaling_slurm.launch.plan import JobPlan
    from scaling_slurm.slurm.cluster import Directive


def plan(
    config: options.Config,
    overrides: options.Overrides = None,
    cluster: options.Cluster = "local",
    nodes: options.Nodes = None,
    time: options.Time = None,
    account: options.Account = None,
    partition: options.Partition = None,
    sbatch: options.Sbatch = None,
    name: options.Name = None,
    runs: options.Runs = None,
) -> None:
    """Show what a submission would do, and send nothing.

    Prints layout, batch, memory, cost and job script. Problems of the request go to stderr and exit with their code;
    what is only not ready on this machine is listed there too and exits 0.
    """
    show(plan_from_options(config, overrides, cluster, nodes, time, account, partition, sbatch, name, runs))


def plan_from_options(
    config: str,
    overrides: Sequence[str] | None,
    cluster: str,
    nodes: int | None,
    time: str | None,
    account: str | None,
    partition: str | None,
    sbatch: Sequence[str] | None,
    name: str | None,
    runs: Path | None,
) -> "JobPlan":
    """The plan of a new run as the options of `plan` and `submit` describe it."""
    from scaling_slurm.launch.plan import plan as make_plan
    from scaling_slurm.launch.runs import runs_root
    from scaling_slurm.slurm.cluster import load_cluster
    from scaling_slurm.transformer.config import load_run

    changes = [*(overrides or ()), *allocation_overrides(nodes, time)]
    run = load_run(config, changes)
    site = load_cluster(cluster, directives=parse_directives(sbatch))
    root = runs_root(runs, site.value)
    return make_plan(run, site, runs_root=root, account=account, partition=partition, run_id=name)


def allocation_overrides(nodes: int | None, time: str | None) -> list[str]:
    """The options as overrides of the run file; the quotes keep a time from being read as a number."""
    import json

    given = {"nodes": nodes, "time": time}
    return [f"allocation.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]


def parse_directives(sbatch: Sequence[str] | None) -> "dict[str, Directive | None]":
    """name=value, a bare name for a flag, "name=" to remove what the profile would write; leading dashes may stay."""
    pairs = (text.removeprefix("--").partition("=") for text in sbatch or ())
    return {name: (value or None) if equals else True for name, equals, value in pairs}


def show(job: "JobPlan") -> None:
    """Print a plan; what submitting would refuse goes to stderr, and a problem of the request sets the exit code."""
    from scaling_slurm.launch.plan import describe

    typer.echo(f"{describe(job)}\n\n{job.script}", nl=False)
    for problem in job.problems:
        typer.echo(f"error: {problem}", err=True)
    for obstacle in job.obstacles:
        typer.echo(f"not ready to submit: {obstacle}", err=True)
    if job.problems:
        raise typer.Exit(job.problems[0].exit_code)
