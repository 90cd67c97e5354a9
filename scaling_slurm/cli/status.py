"""`scaling status`: how runs are."""

import json as json_module
from typing import Annotated

import typer

from scaling_slurm.cli import options


def status(
    run: Annotated[str | None, typer.Argument(help="Run, its directory, or a job id; by default all runs.")] = None,
    runs: options.Runs = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line for each run, on stdout.")] = False,
) -> None:
    """Show state, step and speed of one run or of all."""
    from scaling_slurm.launch.runs import find_run, list_runs, runs_root, status_of

    root = runs_root(runs)
    found = [find_run(run, root)] if run is not None else list_runs(root)
    if not found:
        typer.echo(f"no runs under {root}", err=True)
    rows = [("RUN", "JOB", "STATE", "STEP", "LOSS", "TOKENS/S", "ATTEMPTS", "REASON")]
    for one in status_of(found):
        if json:
            record = {
                "run": one.run.id,
                "directory": str(one.run.path),
                "job_id": one.job_id,
                "state": one.state,
                "step": one.step,
                "num_steps": one.num_steps,
                "loss": one.loss,
                "tokens_per_second": one.tokens_per_second,
                "attempts": one.attempts,
                "reason": one.reason,
            }
            typer.echo(json_module.dumps(record))
        speed = "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}"
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        step = f"{one.step}/{one.num_steps}"
        rows.append((one.run.id, one.job_id, one.state, step, loss, speed, str(one.attempts), one.reason))
    if not json and len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
