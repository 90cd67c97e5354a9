"""Arguments and options that several verbs share, each with its help text."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Run file, or the name of one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As model.num_layers=24.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run, its directory, or the id of one of its jobs.")]
Cluster = Annotated[str, typer.Option(envvar="SCALING_CLUSTER", help="Profile: a name or a file.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="allocation.nodes")]
Time = Annotated[str | None, typer.Option(help="allocation.time, as 24:00:00, 90m or 1d12h")]
Account = Annotated[str | None, typer.Option(help="Who pays; also $SCALING_ACCOUNT. A resume keeps the last one.")]
Partition = Annotated[str | None, typer.Option(help="By default the profile's. A resume keeps the last one.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(help='A further #SBATCH option, as reservation=maintenance; "name=" removes one. Can be repeated.'),
]
Name = Annotated[str | None, typer.Option(help="Name of the run directory, instead of the numbered one.")]
Runs = Annotated[
    Path | None, typer.Option(help="Folder of the runs; by default $SCALING_RUNS, the profile's, or ./runs.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the job id only.")]
