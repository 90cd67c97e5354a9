"""Settings: what every configuration class inherits, and how a YAML file becomes one. Knows none of the classes.

Precedence: defaults < the file's extends < the file < key=value overrides < the command line's own options.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from scaling_slurm.errors import ConfigError
from scaling_slurm.settings_fields import annotation_below, explain, takes_none
from scaling_slurm.yaml_tree import Tree, kind, merge, parse_value, read_yaml, tree_of, write_yaml

COMMAND_LINE = "command line"
DEFAULT = "default"


class Settings(BaseModel):
    """A section of a settings file: immutable, and a key that it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


_FORMS = 'it should be like "24:00:00", "1-12:00:00", "90" (minutes), "90m", "2h" or "1d12h"'
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_UNITS = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


@dataclass(frozen=True, order=True)
class Duration:
    """A positive length of time. In YAML a string: any of Slurm's six forms, or one with units like "90m", "1d12h".

    Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds (https://slurm.schedmd.com/sbatch.html#OPT_time). So "30" and "30:00" are 30 minutes.
    """

    seconds: int

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Raises ValueError where the text is none of the forms, or zero."""
        if clock := _CLOCK.fullmatch(text.strip()):
            first, second, third = (int(clock[name] or 0) for name in ("first", "second", "third"))
            if clock["days"] is not None:
                seconds = int(clock["days"]) * 86400 + first * 3600 + second * 60 + third
            elif clock["third"] is not None:
                seconds = first * 3600 + second * 60 + third
            else:
                seconds = first * 60 + second
        elif units := _UNITS.fullmatch(text.strip()):
            days, hours, minutes, rest = (int(count or 0) for count in units.groups())
            seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
        else:
            raise ValueError(_FORMS)
        if seconds == 0:
            raise ValueError("it should be longer than zero")
        return cls(seconds)

    @property
    def minutes(self) -> int:
        """Whole minutes, rounded up as Slurm rounds its limits."""
        return -(-self.seconds // 60)

    def slurm(self) -> str:
        """As D-HH:MM:SS."""
        minutes, seconds = divmod(self.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        return f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}"

    def __str__(self) -> str:
        return self.slurm()

    @classmethod
    def _validate(cls, value: object) -> "Duration":
        if isinstance(value, Duration):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if type(value) is int:
            raise ValueError(f'quote it, "{value}", for minutes, or give the unit, {value}m or {value}h')
        raise ValueError(_FORMS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_text = core_schema.plain_serializer_function_ser_schema(
            cls.slurm, return_schema=core_schema.str_schema(), when_used="json"
        )
        return core_schema.no_info_plain_validator_function(cls._validate, serialization=as_text)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "examples": ["24:00:00", "1-12:00:00", "90m"]}


AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True)
class Loaded(Generic[AnySettings]):
    """Settings, and for each of their dotted keys where it was set: "file:line", "command line" or "default"."""

    value: AnySettings
    origins: dict[str, str]
    path: Path


def load_settings(
    model: type[AnySettings],
    path: Path | str,
    *,
    overrides: Sequence[str] = (),
    assignments: Mapping[str, object] | None = None,
    shipped: Path | None = None,
) -> Loaded[AnySettings]:
    """Read a YAML file, with what it extends, into a settings class. Raises ConfigError, one line for each problem.

    An override is "dotted.key=value" with the value as in YAML. An assignment is a dotted key with a plain value, as
    the command line's options have it; None there means that the option was not given. In a file and in an override
    null (or nothing) undoes what was inherited: it is None where the field takes None, else the default comes back.
    `extends` names files relative to the one it stands in, or shipped/NAME in the folder `shipped`.
    """
    path = Path(path)
    tree = _read_extended(path, shipped)
    for override in overrides:
        tree = _override(tree, override)
    for key, value in (assignments or {}).items():
        if value is not None:
            tree = _assign(tree, key.split("."), tree_of(value, COMMAND_LINE))
    tree = _drop_nulls(tree, model)
    try:
        value = model.model_validate(tree.plain())
    except ValidationError as error:
        raise explain(error, model, tree) from None
    origins = {".".join(keys): found.origin if (found := tree.at(keys)) else DEFAULT for keys, _ in leaves(value)}
    return Loaded(value, origins, path)


def leaves(settings: Settings) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value, as it stands in YAML, with the keys that lead to it."""
    return _leaves(settings.model_dump(mode="json"), ())


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*keys, str(key)))
    else:
        yield keys, value


def dump_yaml(settings: Settings) -> str:
    """Every field as YAML, in the order of the class; load_settings reads an equal value back."""
    return write_yaml(settings.model_dump(mode="json"))


def fingerprint(settings: Settings) -> str:
    """8 hex digits of the values that differ from their defaults, however they were written.

    So a setting that a later version adds renames no run.
    """
    values = settings.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())[:8]


def _read_extended(path: Path, shipped: Path | None, chain: tuple[Path, ...] = (), named_at: str = "") -> Tree:
    """The file merged over the files it extends; chain holds the files that led here, the last one at named_at."""
    tree = read_yaml(path, named_at)
    assert isinstance(tree.value, dict)
    extends = tree.value.get("extends")
    if extends is None:
        return tree
    own = Tree({key: child for key, child in tree.value.items() if key != "extends"}, tree.origin)
    names = extends.value if isinstance(extends.value, list) else [extends]
    base = Tree({}, tree.origin)
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(
                f"extends names {kind(name.value)}", "it should be a file or a list of files", name.origin
            )
        parent = path.parent / name.value
        if shipped is not None and name.value.startswith("shipped/"):
            parent = (shipped / name.value.removeprefix("shipped/")).with_suffix(".yaml")
        files = (*chain, path)
        if parent.resolve() in {file.resolve() for file in files}:
            cycle = " -> ".join(str(file) for file in (*files, parent))
            raise ConfigError(f"extends goes in a circle: {cycle}", "remove one of them", name.origin)
        base = merge(base, _read_extended(parent, shipped, files, name.origin))
    return merge(base, own)


def _override(tree: Tree, override: str) -> Tree:
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys) or any(character.isspace() for character in key.strip()):
        raise ConfigError(f"the override {override!r} has no key and value", "write it like model.num_layers=24")
    try:
        value = parse_value(text, COMMAND_LINE)
    except ConfigError as error:
        raise ConfigError(
            error.wrong, "put the value in quotes: " + f"{key}='\"...\"'", f"override {override}"
        ) from None
    return _assign(tree, keys, value)


def _assign(tree: Tree, keys: Sequence[str], value: Tree) -> Tree:
    for count in range(1, len(keys)):
        around = tree.at(keys[:count])
        if around and around.value is not None and not isinstance(around.value, dict):
            name = ".".join(keys[:count])
            wrong = f"{'.'.join(keys)} cannot be set: {name} is {kind(around.value)}, not a section"
            raise ConfigError(wrong, f"set {name} as a whole", around.origin)
    for count in range(len(keys) - 1, -1, -1):
        around = tree.at(keys[:count])
        value = Tree({keys[count]: value}, around.origin if around else value.origin)
    return merge(tree, value)


def _drop_nulls(tree: Tree, annotation: object) -> Tree:
    """Without the nulls that their field does not take: as if these keys had not been written."""
    if not isinstance(tree.value, dict):
        return tree
    children = {}
    for key, child in tree.value.items():
        inner = annotation_below(annotation, key)
        if child.value is not None or takes_none(inner):
            children[key] = _drop_nulls(child, inner)
    return Tree(children, tree.origin)
