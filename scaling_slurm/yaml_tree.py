"""YAML text as a tree in which every value knows its file and line.

Scalars follow YAML 1.2: 24:00:00, on, no, 0123 and dates are strings, 1e-4 is a number. Knows no settings class.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import yaml

from scaling_slurm.errors import ConfigError

Value: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"


@dataclass(frozen=True)
class Tree:
    """A value and where it was written: "file:line" or "command line"."""

    value: Value
    origin: str

    def at(self, keys: Sequence[str | int]) -> "Tree | None":
        """The value under these keys, or None where there is none."""
        tree: Tree | None = self
        for key in keys:
            value = tree.value if tree else None
            if isinstance(value, dict) and isinstance(key, str):
                tree = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                tree = value[key]
            else:
                return None
        return tree

    def plain(self) -> object:
        """The same without origins: dict, list and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def tree_of(plain: object, origin: str) -> Tree:
    """Plain data as a tree; a scalar that YAML does not have, such as a path, becomes text."""
    if isinstance(plain, Mapping):
        return Tree({str(key): tree_of(child, origin) for key, child in plain.items()}, origin)
    if isinstance(plain, list | tuple):
        return Tree([tree_of(child, origin) for child in plain], origin)
    return Tree(plain if isinstance(plain, str | int | float | None) else str(plain), origin)


def merge(base: Tree, overlay: Tree) -> Tree:
    """Mappings merge key by key; anything else, null too, replaces what was there."""
    if not (isinstance(base.value, dict) and isinstance(overlay.value, dict)):
        return overlay
    merged = dict(base.value)
    for key, child in overlay.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Tree(merged, overlay.origin)


class _Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2's core schema, except that digits after a leading zero stay a string."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_FLOAT = (
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)
_SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in (*_SCALARS, "str")}


class _Dumper(yaml.SafeDumper):
    """Quotes a string that either YAML 1.1 or 1.2 would read as something else; text of several lines as a block."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        if any(mark in text for mark in "\x85\u2028\u2029"):  # line breaks of YAML 1.1, which only escapes keep
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT})\Z"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7]+\Z"), ["0"])


def write_yaml(plain: object) -> str:
    """Plain data as YAML, keys in the order given."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: Path, named_at: str = "") -> Tree:
    """The mapping in a file. Raises ConfigError with file and line for anything that is not one.

    named_at is the line that named the file, if any, for the message that it is missing.
    """
    tree = _parse(_read_text(path, named_at), lambda line: f"{path}:{line}")
    right = 'it should hold settings, "key: value" on each line'
    if tree is None:
        raise ConfigError(f"{path} is empty", right)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path} holds {kind(tree.value)}", right, tree.origin)
    return tree


def parse_value(text: str, origin: str) -> Tree:
    """One value as in YAML: a scalar, or a list or mapping in [] or {}; whatever else YAML would see is plain text."""
    return _parse(text, lambda line: origin, block=False) or Tree(None, origin)


def kind(value: object) -> str:
    """What a value is, in a user's words."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _read_text(path: Path, named_at: str) -> str:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        files = {file.stem: str(file) for file in sorted(folder.glob("*.y*ml"))}
        near = difflib.get_close_matches(path.stem, files, n=3) or list(files)[:5]
        right = f"did you mean {', '.join(files[name] for name in near)}?" if near else "no YAML file is there"
        raise ConfigError(f"{path} does not exist", right, named_at or f"searched in {folder.absolute()}") from None
    except IsADirectoryError:
        names = sorted(entry.name for entry in path.glob("*.y*ml"))[:5]
        raise ConfigError(
            f"{path} is a directory", " such as ".join(["name a YAML file", *names][:2]), named_at
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wrong = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise ConfigError(wrong, "save the file as UTF-8", f"{path}:{line}") from None


def _parse(text: str, where: Callable[[int], str], *, block: bool = True) -> Tree | None:
    """The tree of one document, None for no document; where gives the origin for a line, counted from 1."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if not block and isinstance(node, yaml.CollectionNode) and not node.flow_style:
            return Tree(text, where(1))
        return _to_tree(loader, node, where, ())
    except yaml.MarkedYAMLError as error:
        starts_earlier = error.context and ("scanning" in error.context or "flow" in error.context)
        mark = (error.context_mark if starts_earlier else None) or error.problem_mark
        line = mark.line if mark else 0
        problem = str(error.problem or error.context).replace("'\\x00'", "the end")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        problem = f"character U+{error.character:04X} is not allowed"
    written = text.split("\n")[min(line, text.count("\n"))]
    indented_by_tab = "\t" in written[: len(written) - len(written.lstrip())]
    right = (
        "indent with spaces, not tabs" if indented_by_tab else "check its indentation, or put quotes around the text"
    )
    raise ConfigError(f"not YAML: {problem}: {written.strip()!r}", right, where(line + 1))


def _to_tree(loader: _Loader, node: yaml.Node, where: Callable[[int], str], inside: tuple[yaml.Node, ...]) -> Tree:
    """Children first; inside holds the collections around the node, to refuse an alias to one of them."""
    origin = where(node.start_mark.line + 1)
    if node in inside:
        raise ConfigError("an alias stands inside its own anchor", "write the values out", origin)
    if isinstance(node, yaml.SequenceNode):
        return Tree([_to_tree(loader, child, where, (*inside, node)) for child in node.value], origin)
    if isinstance(node, yaml.MappingNode):
        children: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a list or a mapping cannot be a key", "use text as keys", where(line))
            if key.value in children:
                wrong = f"the key {key.value!r} stands twice, in lines {lines[key.value]} and {line}"
                raise ConfigError(wrong, "remove one of them", where(line))
            tree = _to_tree(loader, child, where, (*inside, node))
            children[key.value], lines[key.value] = Tree(tree.value, where(line)), line
        return Tree(children, origin)
    if node.tag not in _SCALAR_TAGS:
        raise ConfigError(f"the tag {node.tag} is not supported", "remove the tag", origin)
    try:
        return Tree(loader.construct_object(node), origin)
    except ValueError:
        raise ConfigError(f"{node.value!r} does not fit its tag {node.tag}", "remove the tag", origin) from None
