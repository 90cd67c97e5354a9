"""`scaling resume`: continues a run with a new job."""

from pathlib import Path
from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(help="Run, its directory, or the id of one of its jobs.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As trainer.num_steps=20000.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Another profile than the last one.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="allocation.nodes")] = None,
    time: Annotated[str | None, typer.Option(help="allocation.time, as 24:00:00, 90m or 1d12h")] = None,
    account: Annotated[str | None, typer.Option(help="Who pays; by default as before.")] = None,
    partition: Annotated[str | None, typer.Option(help="By default as before.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further #SBATCH option, as name=value.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; by default $SCALING_RUNS or ./runs.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the job id only.")] = False,
) -> None:
    """Continue a run from its newest complete checkpoint. Refuses while a job of the run is live."""
    from scaling_slurm.cli.plan import allocation_overrides, parse_directives, show
    from scaling_slurm.launch.resume import Changes, is_finished, plan_resume
    from scaling_slurm.launch.resume import resume as send
    from scaling_slurm.launch.runs import find_run

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
        return
    planned, job_id = send(found, changes)
    if quiet:
        typer.echo(job_id)
        return
    typer.echo(f"job {job_id} on {planned.cluster.name} continues run {planned.run_id}")
    typer.echo(f"follow     scaling logs -f {planned.run_id}")
