"""What the fields of a settings class take, and a failed validation in a user's words. Knows none of the classes."""

import difflib
import json
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from scaling_slurm.errors import ConfigError
from scaling_slurm.yaml_tree import Tree

SHOWN_PROBLEMS = 5


def _alternatives(annotation: object) -> Iterator[object]:
    """The members of a union, through Annotated; the annotation itself where it is none."""
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def takes_none(annotation: object) -> bool:
    """Whether null is a value of a field with this annotation."""
    return any(member in (Any, object, None, type(None)) for member in _alternatives(annotation))


def annotation_below(annotation: object, key: str | int) -> Any:
    """The annotation of what stands under this key of a section, a mapping or a list; Any where it is not known."""
    if section := _section_class(annotation):
        field = section.model_fields.get(str(key))
        return field.annotation if field else Any
    for member in _alternatives(annotation):
        if get_origin(member) in (dict, list):
            return get_args(member)[-1]
    return Any


def _section_class(annotation: object) -> type[BaseModel] | None:
    """The settings class of a field that is a section, else None."""
    classes = (member for member in _alternatives(annotation) if isinstance(member, type))
    return next((member for member in classes if issubclass(member, BaseModel)), None)


def _section_at(model: type[BaseModel], keys: Sequence[str | int]) -> type[BaseModel] | None:
    annotation: Any = model
    for key in keys:
        annotation = annotation_below(annotation, key)
    return _section_class(annotation)


def _all_keys(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a class and of its sections: its own name, its dotted key."""
    for name, field in model.model_fields.items():
        yield name, above + name
        if section := _section_class(field.annotation):
            yield from _all_keys(section, f"{above}{name}.")


def explain(error: ValidationError, model: type[BaseModel], tree: Tree) -> ConfigError:
    """The first problems, a line each; tree is what was validated.

    Unknown keys come first: one that is mistyped is also why another one is missing.
    """
    found = sorted(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
    problems = [_explain(details, model, tree) for details in found]
    if len(problems) == 1:
        return problems[0]
    lines = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - SHOWN_PROBLEMS} more problems")
    return ConfigError("\n".join(lines))


def _explain(details: ErrorDetails, model: type[BaseModel], tree: Tree) -> ConfigError:
    """One problem: the dotted key and its value; what would be right; where the nearest key that is there was set."""
    found, keys = tree, list[str | int]()
    for key in details["loc"]:  # pydantic also puts the names of a union's members here: they are not in the tree
        if child := found.at([key]):
            found = child
            keys.append(key)
    if details["type"] == "missing":
        keys.append(details["loc"][-1])
    name = ".".join(map(str, keys))
    around = _section_at(model, keys[:-1])
    field = around.model_fields.get(str(keys[-1])) if around and keys else None
    message = details["msg"].removeprefix("Value error, ")
    text = json.dumps(found.plain(), ensure_ascii=False)
    written = f"{name} is {text if len(text) <= 80 else text[:77] + '...'}"
    match details["type"]:
        case "missing":
            section = _section_at(model, keys)
            needs = [key for key, part in section.model_fields.items() if part.is_required()] if section else []
            right = f"add a section with {', '.join(needs)}" if needs else "add it"
            if field and field.description and not needs:
                right += ": " + " ".join(field.description.split()).rstrip(".")
            return ConfigError(f"{name} is missing", right, found.origin)
        case "extra_forbidden":
            return ConfigError(f"unknown key {name}", _nearest(model, keys), found.origin)
        case "value_error" if isinstance(found.value, dict):
            return ConfigError(message, where=_named_in(message, found))
        case "value_error":
            return ConfigError(written, message, found.origin)
        case "string_type" if not isinstance(found.value, dict | list):
            return ConfigError(written, "it should be text: put quotes around it", found.origin)
        case "string_pattern_mismatch" if field and field.description:
            return ConfigError(
                written, f"it should match {details['ctx']['pattern']}: {field.description}", found.origin
            )
        case "model_type" | "model_attributes_type":
            return ConfigError(written, "it should be a section with keys of its own", found.origin)
        case _:
            return ConfigError(
                written, message.replace("Input should", "it should").split(", unable to")[0], found.origin
            )


def _named_in(message: str, section: Tree) -> str:
    """Where the keys that a message names were set."""
    named = [child.origin for word in re.findall(r"[\w.]+", message) if (child := section.at(word.split(".")))]
    return ", ".join(dict.fromkeys(named)) or section.origin


def _nearest(model: type[BaseModel], keys: list[str | int]) -> str:
    """The key that was probably meant: in the same section, else a like one in any other, else what the section has."""
    section = _section_at(model, keys[:-1])
    above = "".join(f"{key}." for key in keys[:-1])
    here = {name: above + name for name in section.model_fields} if section else {}
    elsewhere: dict[str, str] = {}
    for name, dotted in _all_keys(model):
        elsewhere.setdefault(name, dotted)
    last = str(keys[-1])
    for pool, cutoff in ((here, 0.8), (elsewhere, 1.0), (here, 0.6), (elsewhere, 0.75)):
        if near := difflib.get_close_matches(last.rpartition(".")[2], pool, n=1, cutoff=cutoff):
            meant = pool[near[0]]
            return f"did you mean {meant}?" if meant != above + last else f"write it below {last.split('.')[0]}:"
    return f"known here: {', '.join(here)}" if here else "remove it"
