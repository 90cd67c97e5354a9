"""YAML 1.2 scalars there and back, the place of each value, and the message for each way a file can be broken."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_slurm.errors import ConfigError
from scaling_slurm.yaml_tree import Tree, merge, parse_value, read_yaml, tree_of, write_yaml

SMALL = "name: tiny\nmodel:\n  num_layers: 2\n"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the working directory and returns its relative path, as a user would name it."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes, name: str = "run.yaml") -> Path:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return Path(name)

    return write_file


def value_in(path: Path) -> object:
    tree = read_yaml(path).at(["value"])
    assert tree
    return tree.plain()


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    return str(caught.value)


class TestScalars:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("12:30:00", "12:30:00"),
            ("1:30", "1:30"),
            ("on", "on"),
            ("off", "off"),
            ("yes", "yes"),
            ("No", "No"),
            ("y", "y"),
            ("true", True),
            ("False", False),
            ("0123", "0123"),
            ("0o17", 15),
            ("0x1F", 31),
            ("1_000", "1_000"),
            ("-12", -12),
            ("1e-4", 1e-4),
            ("1E3", 1000.0),
            ("-.5", -0.5),
            ("1.", 1.0),
            ("1e", "1e"),
            (".", "."),
            ("2026-01-02", "2026-01-02"),
            ("2026-01-02 03:04:05", "2026-01-02 03:04:05"),
            ("~", None),
            ("null", None),
            ("", None),
            ("'5'", "5"),
            ("=", "="),
            ("<<", "<<"),
            ("[1, a, 1e-4]", [1, "a", 1e-4]),
            ("{on: 1}", {"on": 1}),
        ],
    )
    def test_as_in_yaml_1_2(self, write: Write, text: str, value: object) -> None:
        read = value_in(write(f"value: {text}\n"))
        assert read == value
        assert type(read) is type(value)

    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()

    @settings(deadline=None)
    @given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
    def test_what_is_written_reads_back(self, tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
        path = tmp_path_factory.getbasetemp() / "written.yaml"
        path.write_text(write_yaml({"value": value}), encoding="utf-8")
        assert value_in(path) == value

    @settings(deadline=None)
    @given(st.from_regex(r"[-+0-9.eoxE:_]{1,6}|(on|off|yes|no|true|null|~)", fullmatch=True))
    def test_text_that_looks_like_something_else_stays_text(
        self, tmp_path_factory: pytest.TempPathFactory, text: str
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "text.yaml"
        path.write_text(write_yaml({"value": text}))
        assert value_in(path) == text


class TestBrokenFiles:
    def test_a_key_that_stands_twice(self, write: Write) -> None:
        path = write(SMALL + "steps: 3\nname: again\n")
        assert message(path) == "the key 'name' stands twice, in lines 1 and 5; remove one of them; run.yaml:5"

    def test_a_nested_key_that_stands_twice(self, write: Write) -> None:
        assert "lines 3 and 4" in message(write(SMALL + "  num_layers: 3\n"))

    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
    def test_empty(self, write: Write, text: str) -> None:
        assert message(write(text)).startswith(("run.yaml is empty", "run.yaml holds nothing"))

    @pytest.mark.parametrize(("text", "kind"), [("- 1\n", "a list"), ("hello\n", "text"), ("3\n", "a number")])
    def test_not_a_mapping(self, write: Write, text: str, kind: str) -> None:
        assert message(write(text)).startswith(f"run.yaml holds {kind}; it should hold settings")

    def test_a_tab(self, write: Write) -> None:
        text = message(write("name: tiny\nmodel:\n\tnum_layers: 2\n"))
        assert text.endswith("indent with spaces, not tabs; run.yaml:3")

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("name: tiny\ndata: [1, 2\nsteps: 3\n", 2),
            ('name: tiny\nenv: {A: "b}\n', 2),
            ("name: tiny\nsteps 3\nmodel:\n  num_layers: 2\n", 2),
            ("name: a: b\n", 1),
            ("name: tiny\n---\nname: other\n", 2),
            ("name: *nothing\n", 1),
            ("name: tiny\nsteps: \x07\n", 2),
            ("name: tiny\nsteps: !!python/object:os.system 3\n", 2),
            ("name: &a [*a]\n", 1),
            ("name: tiny\n? [a]\n: 1\n", 2),
            ("steps: !!int many\n", 1),
        ],
    )
    def test_syntax_errors_are_one_line_with_the_place(self, write: Write, text: str, line: int) -> None:
        assert message(write(text)).endswith(f"run.yaml:{line}")
        assert "\n" not in message(Path("run.yaml"))

    def test_missing_lists_the_nearest_names_and_the_folder(self, write: Write) -> None:
        write(SMALL, "configs/tiny.yaml")
        write(SMALL, "configs/large.yaml")
        text = message(Path("configs/tinny.yaml"))
        assert text.startswith("configs/tinny.yaml does not exist; did you mean configs/tiny.yaml?; searched in /")
        assert text.endswith("/configs")

    def test_directory(self, write: Write) -> None:
        write(SMALL, "configs/tiny.yaml")
        assert message(Path("configs")) == "configs is a directory; name a YAML file such as tiny.yaml"

    def test_not_utf8(self, write: Write) -> None:
        path = write(b"name: tiny\nsteps: \xff\n")
        assert message(path) == "byte 0xff is not UTF-8; save the file as UTF-8; run.yaml:2"

    def test_a_byte_order_mark_is_harmless(self, write: Write) -> None:
        assert value_in(write(b"\xef\xbb\xbfvalue: 1\n")) == 1

    @settings(deadline=None)
    @given(st.text(alphabet="ab:-[]{}'\"&*!|>?%@#, \t\n\r\x85\x07", max_size=12))
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        refusal = None
        try:
            parse_value(text, "here")
        except ConfigError as error:
            refusal = error
        assert refusal is None or (refusal.where == "here" and "\n" not in str(refusal))


class TestTree:
    def test_every_value_knows_its_line(self, write: Write) -> None:
        tree = read_yaml(write("a: 1\nb:\n  c: [x,\n    y]\nd: &anchor\n  e: 2\nf: *anchor\n"))
        places = {(): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 1): 4, ("d", "e"): 6, ("f",): 7}
        for keys, line in places.items():
            found = tree.at(keys)
            assert found
            assert found.origin == f"run.yaml:{line}"

    def test_where_nothing_is(self) -> None:
        tree = tree_of({"a": [1], "b": "text"}, "here")
        assert tree.at(["a", 0]) == Tree(1, "here")
        for keys in (["c"], ["a", 1], ["a", "x"], ["b", "x"], ["b", 0]):
            assert tree.at(keys) is None

    def test_merge_keeps_the_origin_of_each_value(self) -> None:
        base = tree_of({"a": {"x": 1, "y": [1, 2]}, "b": 1}, "base")
        merged = merge(base, tree_of({"a": {"y": [3]}, "b": None, "c": {}}, "overlay"))
        assert merged.plain() == {"a": {"x": 1, "y": [3]}, "b": None, "c": {}}
        x, y = merged.at(["a", "x"]), merged.at(["a", "y"])
        assert x
        assert y
        assert (x.origin, y.origin) == ("base", "overlay")

    def test_plain_data_of_other_kinds_becomes_text(self) -> None:
        assert tree_of({"a": Path("b/c"), "d": (1, True)}, "").plain() == {"a": "b/c", "d": [1, True]}

    @pytest.mark.parametrize(("text", "value"), [("", None), ("[a, 1]", ["a", 1]), ("a: b", "a: b"), ("- a", "- a")])
    def test_one_value(self, text: str, value: object) -> None:
        tree = parse_value(text, "command line")
        assert tree.plain() == value
        assert tree.origin == "command line"
