"""`scaling submit`: sends a run to a cluster."""

from typing import TYPE_CHECKING

import typer

from scaling_slurm.cli import options

if TYPE_CHECKING:
    from scaling_slurm.launch.plan import JobPlan


def submit(
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
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Send a run to a cluster, or start it on this machine.

    Without --cluster it starts here, as with --cluster local. Returns at once.
    """
    from scaling_slurm.cli.plan import plan_from_options, show

    def make_plan() -> "JobPlan":
        return plan_from_options(config, overrides, cluster, nodes, time, account, partition, sbatch, name, runs)

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
