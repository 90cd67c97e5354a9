"""`scaling clusters`: the cluster profiles that can be named, or one of them in full."""

from typing import Annotated

import typer


def clusters(name: Annotated[str | None, typer.Argument(help="Profile to show in full.")] = None) -> None:
    """List the cluster profiles, or print one of them in full.

    In full: with its defaults and where it was found.
    """
    from scaling_slurm.errors import ConfigError
    from scaling_slurm.resources import list_names
    from scaling_slurm.settings import dump_yaml
    from scaling_slurm.slurm.cluster import load_cluster

    if name is not None:
        loaded = load_cluster(name)
        typer.echo(f"# {loaded.path}\n{dump_yaml(loaded.value)}", nl=False)
        return
    rows, broken = [("NAME", "DESCRIPTION", "VERIFIED")], []
    for found, path in list_names("clusters").items():
        try:
            profile = load_cluster(str(path)).value
        except ConfigError as error:
            first, *others = str(error).splitlines()
            more = f" (and more: `scaling clusters {found}` shows all)" if others else ""
            broken.append(f"{path} cannot be used: {first}{more}")
        else:
            rows.append((found, profile.description, profile.verified))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for found, description, verified in rows:
        typer.echo(f"{found:{widths[0]}}  {description:{widths[1]}}  {verified}".rstrip())
    for line in broken:
        typer.echo(line, err=True)
