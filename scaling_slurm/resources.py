"""Finds templates, cluster profiles and run files by name: the user's own first, then what is shipped.

Reads none of them.
"""

import difflib
import os
from pathlib import Path
from typing import Literal

from scaling_slurm.errors import ConfigError

Kind = Literal["templates", "clusters", "configs"]

_SUFFIXES: dict[Kind, str] = {"templates": ".sbatch.j2", "clusters": ".yaml", "configs": ".yaml"}
_PACKAGE = Path(__file__).resolve().parent


def user_folder() -> Path:
    """The user's own folder: $SCALING_HOME, else scaling/ in the user's configuration directory."""
    if home := os.environ.get("SCALING_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "scaling"


def shipped_folder(kind: Kind) -> Path:
    """In an installed package its own data, in a checkout the folder at the top."""
    installed = _PACKAGE / "_data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def search_path(kind: Kind) -> list[Path]:
    """The folders where a name is looked for, in order; they need not exist.

    The working directory's comes first, unless it is the shipped one, as in a checkout: then the user's own goes first.
    """
    here, shipped = Path(kind), shipped_folder(kind)
    if here.resolve() == shipped.resolve():
        return [user_folder() / kind, here]
    return [here, user_folder() / kind, shipped]


def list_names(kind: Kind) -> dict[str, Path]:
    """Every name, without suffix, and the file that find() takes for it; sorted by name."""
    found: dict[str, Path] = {}
    for folder in search_path(kind):
        for path in folder.glob(f"[!.]*{_SUFFIXES[kind]}"):
            found.setdefault(path.name.removesuffix(_SUFFIXES[kind]), path)
    return dict(sorted(found.items()))


def find(kind: Kind, name: str | Path) -> Path:
    """The file of a name ("booster") or, where name has a slash or a suffix, at that path. Raises ConfigError."""
    text, suffix = str(name), _SUFFIXES[kind]
    path = Path(text).expanduser()
    is_path = os.sep in text
    if path.is_file() and (is_path or path.suffix):
        return path
    known = list_names(kind)
    if not is_path and (found := known.get(text.removesuffix(suffix))):
        return found
    if not is_path:
        wrong, folders, choices = f"there is no {kind.removesuffix('s')} {text!r}", search_path(kind), dict(known)
    else:
        wrong = f"{text} is a directory" if path.is_dir() else f"{text} does not exist"
        folders = [path if path.is_dir() else path.parent]
        choices = {file.name.removesuffix(suffix): file for file in sorted(folders[0].glob(f"[!.]*{suffix}"))}
    labels = {name: str(file) if is_path else name for name, file in choices.items()}
    near = difflib.get_close_matches(path.name.removesuffix(suffix), labels, n=3)
    if near:
        right = f"did you mean {', '.join(labels[name] for name in near)}?"
    else:
        right = f"there is {', '.join(labels.values()) or 'none'}"
    raise ConfigError(wrong, right, f"searched in {', '.join(str(folder.absolute()) for folder in folders)}")
