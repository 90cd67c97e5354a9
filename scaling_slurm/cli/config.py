"""`scaling config`: shows what a run file resolves to, and the schema of the files that a user writes."""

from typing import Annotated

import typer

from scaling_slurm.cli import options

app = typer.Typer(no_args_is_help=True, help="Show a run file as it resolves, or the schema of the files.")


@app.command()
def show(
    config: options.Config,
    overrides: options.Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Each key with the place that set it.")] = False,
) -> None:
    """Print every setting of a run, defaults included, as YAML that can be run again."""
    from scaling_slurm.settings import dump_yaml, leaves
    from scaling_slurm.transformer.config import load_run

    loaded = load_run(config, overrides or ())
    if not origin:
        typer.echo(dump_yaml(loaded.value), nl=False)
        return
    import json

    lines = [(".".join(keys), json.dumps(value, ensure_ascii=False)) for keys, value in leaves(loaded.value)]
    width = max(len(key) + len(value) for key, value in lines) + 2
    for key, value in lines:
        typer.echo(f"{f'{key}: {value}':{width}}  # {loaded.origins[key]}")


@app.command()
def schema(of: Annotated[str, typer.Argument(metavar="[run|cluster]", help="Which file.")] = "run") -> None:
    """Print the JSON Schema of run files or cluster profiles, for editors."""
    import json

    from scaling_slurm.errors import ConfigError
    from scaling_slurm.settings import Settings

    model: type[Settings]
    if of == "run":
        from scaling_slurm.transformer.config import RunConfig

        model = RunConfig
    elif of == "cluster":
        from scaling_slurm.slurm.cluster import ClusterProfile

        model = ClusterProfile
    else:
        raise ConfigError(f"there is no schema of {of!r}", "there are run, of run files, and cluster, of profiles")
    contents = model.model_json_schema()
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    contents["properties"]["extends"] = {"description": "Files that this one builds on; later ones win.", **files}
    typer.echo(json.dumps(contents, indent=2))
