"""Renders job scripts from Jinja templates, the user's own before the shipped ones. Knows no field of any template."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_tb

from jinja2 import (
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
)

from scaling_slurm.errors import ConfigError
from scaling_slurm.resources import search_path, shipped_folder

SUFFIX = ".sbatch.j2"


def quote(value: object) -> str:
    """One word of bash, whatever is in it. Raises ConfigError for control characters, which would end its line."""
    return shlex.quote(_printable(value))


def directive_value(value: object) -> str:
    """A value in a #SBATCH line, which sbatch parses itself, not bash.

    There, blanks end a word and # begins a comment unless quoted, and a backslash takes the next character as it is
    even between quotes.
    """
    text = _printable(value)
    if re.fullmatch(r"[\w@%+=:,./()\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise ConfigError(
            f"{text!r} holds a control character", "values in a job script are one line of printable characters"
        )
    return text


def render(name: str, context: Mapping[str, object], *, folders: Sequence[Path] | None = None) -> str:
    """The text of a job script.

    Args:
        name: "train" for train.sbatch.j2. A template may extend the shipped one of its own name as
            "shipped/train.sbatch.j2" and replace a block.
        folders: Where to look before the shipped templates; by default as resources.find does.

    Raises ConfigError with the template's file and line.
    """
    file = name if name.endswith(SUFFIX) else name + SUFFIX
    folders = search_path("templates") if folders is None else folders
    try:
        environment = _build_environment(folders)
        _refuse_misspelt_blocks(environment, file)
        return environment.get_template(file).render(context)
    except TemplateNotFound as error:
        raise ConfigError(
            f"there is no template {error.name}", "", "searched in " + ", ".join(map(str, folders))
        ) from None
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the template cannot be read: {error.message}", "", f"{error.filename or file}:{error.lineno}"
        ) from None
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"the template failed: {error}", "", _template_line(error) or file) from None


def _build_environment(folders: Sequence[Path]) -> Environment:
    shipped = FileSystemLoader(shipped_folder("templates"))
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folders), PrefixLoader({"shipped": shipped}), shipped]),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": quote, "directive_value": directive_value}
    return environment


def find_template(name: str) -> Path:
    """The file that render takes for a name."""
    environment = _build_environment(search_path("templates"))
    assert environment.loader is not None
    return Path(environment.loader.get_source(environment, name + SUFFIX)[1] or name)


def _refuse_misspelt_blocks(environment: Environment, file: str) -> None:
    """A block of a site's template that nearly has the name of a shipped one would replace nothing, silently."""
    names = {f"shipped/{file}", f"shipped/base{SUFFIX}"} & set(environment.list_templates())
    shipped = {block for name in names for block in environment.get_template(name).blocks}
    own = environment.get_template(file)
    for block in set(own.blocks) - shipped:
        if near := difflib.get_close_matches(block, shipped, n=1):
            raise ConfigError(
                f"block {block!r} replaces nothing",
                f"did you mean {near[0]}? The shipped template has {', '.join(sorted(shipped))}",
                str(own.filename),
            )


def _template_line(error: BaseException) -> str:
    """File and line of the innermost template that an exception came through; Jinja puts them into its traceback."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((f"{file}:{line}" for file, line in reversed(lines) if file.endswith(".j2")), "")
