"""`scaling train`: trains here, without a scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from scaling_slurm.cli import options


def train(
    config: options.Config,
    overrides: options.Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory; by default named by the config, so that it continues.")
    ] = None,
    runs: options.Runs = None,
) -> None:
    """Train in this process, or as one rank under torchrun or srun. The same command again continues the run."""
    from scaling_slurm.run_directory import RunDirectory
    from scaling_slurm.transformer.config import load_run

    resolved = load_run(config, overrides or ()).value.with_absolute_paths()

    if run is not None and (run / "jobs.jsonl").exists():
        from scaling_slurm.launch.runs import refuse_live

        refuse_live(RunDirectory(run.resolve()))

    from scaling_slurm.transformer.train import default_run, train_here

    train_here(resolved, RunDirectory(run.resolve()) if run is not None else default_run(resolved, runs))
