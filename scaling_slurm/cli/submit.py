"""`scaling submit`: sends a run to a cluster."""

from pathlib import Path
from typing import Annotated

import typer


def submit(
    config: Annotated[str, typer.Argument(help="Run file, or the name of one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As model.num_layers=24.")
    ] = None,
    cluster: Annotated[str, typer.Option(envvar="SCALING_CLUSTER", help="Profile: a name or a file.")] = "local",
    nodes: Annotated[int | None, typer.Option(min=1, help="allocation.nodes")] = None,
    time: Annotated[str | None, typer.Option(help="allocation.time, as 24:00:00, 90m or 1d12h")] = None,
    account: Annotated[str | None, typer.Option(help="Who pays; also $SCALING_ACCOUNT.")] = None,
    partition: Annotated[str | None, typer.Option(help="By default the profile's.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further #SBATCH option, as reservation=maintenance; can be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run directory, instead of the numbered one.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; by default the profile's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the job id only.")] = False,
) -> None:
    """Send a run to a cluster, or with --cluster local start it on this machine; returns at once."""
    from scaling_slurm.cli.plan import plan_from_options, show

    def make_plan() -> "JobPlan":
        return plan_from_options(config, overrides, cluster, nodes, time, account, partition, sbatch, name, runs)

    from scaling_slurm.launch.plan import JobPlan

    if dry_run:
        show(make_plan())
        return
    from scaling_slurm.launch.submit import submit as send

    plan, job_id = send(make_plan)
    if quiet:
        typer.echo(job_id)
        return
    typer.echo(f"job {job_id} on {plan.cluster.name}: run {plan.run_id}")
    typer.echo(f"directory  {plan.run_directory}")
    typer.echo(f"follow     scaling logs -f {plan.run_id}")
