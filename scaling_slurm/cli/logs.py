"""`scaling logs`: what a run prints."""

from typing import Annotated

import typer

from scaling_slurm.cli import options


def logs(
    run: options.Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the job has ended, over requeues.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Whose log.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which start of the run; by default the newest.")] = None,
    runs: options.Runs = None,
) -> None:
    """Print a run's log; with -f as it grows. Exits with 7 when the followed job has failed."""
    from scaling_slurm.launch import watch
    from scaling_slurm.launch.failure import explain
    from scaling_slurm.launch.runs import find_run

    found = find_run(run, runs and runs.absolute())
    if follow:
        for text in watch.follow(found, rank):
            typer.echo(text, nl=False)
        return
    path = watch.find_log(found, attempt, rank)
    typer.echo(path.read_text(errors="replace"), nl=False)
    number = attempt or found.list_attempts()[-1].number
    if failure := explain(found, found.attempt(number)):
        typer.echo(f"attempt {number}: {failure.headline}", err=True)
