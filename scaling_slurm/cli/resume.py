"""`scaling resume`: continues a run with a new job."""

from typing import Annotated

import typer

from scaling_slurm.cli import options


def resume(
    run: options.Run,
    overrides: options.Overrides = None,
    cluster: Annotated[str | None, typer.Option(help="Another profile than the last one.")] = None,
    nodes: options.Nodes = None,
    time: options.Time = None,
    account: options.Account = None,
    partition: options.Partition = None,
    sbatch: options.Sbatch = None,
    runs: options.Runs = None,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue a run from its newest complete checkpoint. Refuses while a job of the run is live."""
    from scaling_slurm.cli.plan import allocation_overrides, parse_directives, show
    from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
    from scaling_slurm.errors import ScalingError
    from scaling_slurm.launch.resume import Changes, is_finished, plan_resume
    from scaling_slurm.launch.resume import resume as send
    from scaling_slurm.launch.runs import find_run, refuse_live

    found = find_run(run, runs and runs.absolute())
    changes = Changes(
        (*(overrides or ()), *allocation_overrides(nodes, time)), cluster, account, partition, parse_directives(sbatch)
    )
    planned = plan_resume(found, changes)
    if is_finished(found, planned.config):
        steps = planned.config.trainer.num_steps
        typer.echo(f"{found.id} is finished: step {steps}; trainer.num_steps=N goes on", err=True)
        return
    if dry_run:
        show(planned)
        try:
            refuse_live(found)
        except ScalingError as error:
            typer.echo(f"not ready to submit: {error}", err=True)
        return
    planned, job_id = send(found, changes)
    if quiet:
        typer.echo(job_id)
        return
    committed = CheckpointDirectory(found.checkpoints).committed()
    after = f"after step {committed[0].step}" if committed else "from the start: it has no checkpoint"
    typer.echo(f"job {job_id} on {planned.cluster.name} continues run {planned.run_id} {after}")
    typer.echo(f"follow     scaling logs -f {planned.run_id}")
