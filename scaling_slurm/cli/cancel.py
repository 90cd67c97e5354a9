"""`scaling cancel`: ends a run, after saving or at once."""

from typing import Annotated

import typer

from scaling_slurm.cli import options


def cancel(
    run: options.Run,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the step and the save.")] = False,
    runs: options.Runs = None,
) -> None:
    """End a run after its current step, or at once.

    It finishes its step, saves, leaves and is not requeued. A queued job leaves the queue.
    """
    from scaling_slurm.launch.runs import find_run, load_cluster_of, slurm_of, status_of

    found = find_run(run, runs and runs.absolute())
    status = status_of([found])[0]
    if not status.is_live:
        typer.echo(f"{found.id} is not live: it is {status.state}", err=True)
        return
    found.stop_file.touch()
    found.record_event("cancel", job_id=status.job_id, now=now)
    if now or status.state not in ("RUNNING", "COMPLETING"):
        slurm_of(load_cluster_of(found)).cancel(status.job_id)
        typer.echo(f"cancelled job {status.job_id} of {found.id} (scancel {status.job_id})", err=True)
    else:
        typer.echo(
            f"{found.id} will save and leave after its current step; `scaling cancel --now {found.id}` does not wait",
            err=True,
        )
