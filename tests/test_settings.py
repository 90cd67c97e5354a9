"""Settings files: durations, what extends what, overrides, and writing them back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, PositiveInt, model_validator

from scaling_slurm.errors import ConfigError
from scaling_slurm.settings import Duration, Settings, dump_yaml, fingerprint, load_settings


class Model(Settings):
    num_layers: PositiveInt
    width: int = 8
    activation: Literal["silu", "gelu"] = "silu"


class Optimizer(Settings):
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] | None = "cosine"


class Partition(Settings):
    max_time: Duration | None = None
    max_nodes: PositiveInt = 1


class Run(Settings):
    name: str = Field(pattern="^[a-z]+$", description="Small letters.")
    model: Model
    optimizer: Optimizer = Optimizer()
    time: Duration | None = None
    steps: int = 10
    enabled: bool = False
    data: list[Path] = Field(default=[])
    env: dict[str, str] = Field(default={})
    partitions: dict[str, Partition] = Field(default={})

    @model_validator(mode="after")
    def _ordered(self) -> "Run":
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(f"optimizer.warmup_steps {self.optimizer.warmup_steps} is above steps {self.steps}")
        return self


class Anything(Settings):
    value: Any


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


def message(path: Path, *overrides: str, **assignments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(Run, path, overrides=overrides, assignments=assignments)
    return str(caught.value)


class TestDuration:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("30", 30 * 60),
            ("1:30", 90),
            ("30:00", 30 * 60),
            ("24:00:00", 86400),
            ("72:00:00", 3 * 86400),
            ("1-12", 36 * 3600),
            ("1-12:30", 36 * 3600 + 1800),
            ("1-12:30:15", 36 * 3600 + 1815),
            ("90m", 5400),
            ("2h", 7200),
            ("1d12h", 36 * 3600),
            ("45s", 45),
        ],
    )
    def test_reads_every_form(self, text: str, seconds: int) -> None:
        assert Duration.parse(text).seconds == seconds

    @pytest.mark.parametrize(
        "text", ["", "1:", ":30", "1-", "-5", "1:2:3:4", "12h1d", "1.5h", "two hours", "0", "0:00", "٣"]
    )
    def test_refuses_the_rest(self, text: str) -> None:
        with pytest.raises(ValueError, match="it should be"):
            Duration.parse(text)

    @settings(deadline=None)
    @given(st.integers(1, 10**9))
    def test_reads_back_what_it_writes(self, seconds: int) -> None:
        assert Duration.parse(Duration(seconds).slurm()) == Duration(seconds)

    def test_written_for_slurm(self) -> None:
        assert Duration(36 * 3600 + 61).slurm() == str(Duration(36 * 3600 + 61)) == "1-12:01:01"

    def test_minutes_are_rounded_up(self) -> None:
        assert [Duration(seconds).minutes for seconds in (1, 60, 61)] == [1, 1, 2]

    def test_a_number_in_a_file_is_refused_with_the_hint_to_quote_it(self, write: Write) -> None:
        path = write(SMALL + "time: 90\n")
        assert message(path) == 'time is 90; quote it, "90", for minutes, or give the unit, 90m or 90h; run.yaml:4'

    def test_unquoted_clock_times_are_not_sexagesimal(self, write: Write) -> None:
        run = load_settings(Run, write(SMALL + "time: 24:00:00\n")).value
        assert run.time == Duration(86400)


class TestExtends:
    def test_later_wins_mappings_merge_lists_replace(self, write: Write) -> None:
        write(SMALL + "steps: 1\ndata: [a, b]\nenv: {A: x, B: y}\n", "shared/one.yaml")
        write("steps: 2\nenv: {B: z}\n", "shared/two.yaml")
        path = write("extends: [shared/one.yaml, shared/two.yaml]\ndata: [c]\nmodel: {width: 16}\n")
        loaded = load_settings(Run, path)
        run = loaded.value
        assert (run.name, run.steps, run.data) == ("tiny", 2, [Path("c")])
        assert run.env == {"A": "x", "B": "z"}
        assert (run.model.num_layers, run.model.width) == (2, 16)
        assert loaded.origins["steps"] == "shared/two.yaml:1"
        assert loaded.origins["env.A"] == "shared/one.yaml:6"
        assert loaded.origins["model.width"] == "run.yaml:3"
        assert loaded.origins["model.num_layers"] == "shared/one.yaml:3"
        assert loaded.origins["optimizer.learning_rate"] == "default"

    def test_null_takes_away_what_was_inherited(self, write: Write) -> None:
        write(
            SMALL + "steps: 1\ntime: 1h\nenv: {A: x, B: y}\noptimizer: {warmup_steps: 1, schedule: constant}\n",
            "base.yaml",
        )
        path = write("extends: base.yaml\nsteps: null\ntime:\nenv: {A: null}\noptimizer: {schedule: null}\n")
        run = load_settings(Run, path).value
        assert run.steps == 10  # takes no null: the default
        assert run.time is None
        assert run.env == {"B": "y"}
        assert run.optimizer == Optimizer(warmup_steps=1, schedule=None)

    def test_a_section_without_keys_has_its_defaults(self, write: Write) -> None:
        assert load_settings(Run, write(SMALL + "optimizer:\n#  warmup_steps: 3\n")).value.optimizer == Optimizer()

    def test_paths_start_at_the_file_that_extends(self, write: Write) -> None:
        write(SMALL, "a/base.yaml")
        write("extends: ../a/base.yaml\n", "b/middle.yaml")
        assert load_settings(Run, write("extends: b/middle.yaml\n")).value.name == "tiny"

    def test_a_circle_is_named(self, write: Write) -> None:
        write("extends: b.yaml\n", "a.yaml")
        write("extends: ./a.yaml\n", "b.yaml")
        text = message(Path("a.yaml"))
        assert text == "extends goes in a circle: a.yaml -> b.yaml -> a.yaml; remove one of them; b.yaml:1"

    def test_the_same_file_by_two_ways_is_no_circle(self, write: Write) -> None:
        write(SMALL, "base.yaml")
        write("extends: base.yaml\n", "left.yaml")
        write("extends: base.yaml\nsteps: 4\n", "right.yaml")
        assert load_settings(Run, write("extends: [left.yaml, right.yaml]\n")).value.steps == 4

    def test_a_missing_one_names_the_line(self, write: Write) -> None:
        write(SMALL, "base.yaml")
        assert message(write("extends: bse.yaml\n")) == "bse.yaml does not exist; did you mean base.yaml?; run.yaml:1"

    def test_not_a_file_name(self, write: Write) -> None:
        assert message(write(SMALL + "extends: {a: 1}\n")).startswith("extends names a mapping; it should be a file")


class TestOverrides:
    def test_values_are_yaml(self, write: Write) -> None:
        overrides = ["model.num_layers=24", "optimizer.learning_rate=1e-4", "data=[a, b]", "env={A: x=y}", "time=2h"]
        loaded = load_settings(Run, write(SMALL), overrides=overrides)
        assert loaded.value.model.num_layers == 24
        assert loaded.value.optimizer.learning_rate == 1e-4
        assert loaded.value.data == [Path("a"), Path("b")]
        assert loaded.value.env == {"A": "x=y"}
        assert loaded.value.time == Duration(7200)
        assert loaded.origins["model.num_layers"] == "command line"
        assert loaded.origins["name"] == "run.yaml:1"

    def test_block_style_is_plain_text(self, write: Write) -> None:
        run = load_settings(Run, write(SMALL), overrides=["env.A=a: b", "env.B=- c", "env.C=http://host:80"]).value
        assert run.env == {"A": "a: b", "B": "- c", "C": "http://host:80"}

    def test_nothing_brings_the_default_back(self, write: Write) -> None:
        run = load_settings(Run, write(SMALL + "steps: 3\ntime: 1h\n"), overrides=["steps=", "time="]).value
        assert (run.steps, run.time) == (10, None)

    def test_the_last_one_wins(self, write: Write) -> None:
        assert load_settings(Run, write(SMALL), overrides=["steps=3", "steps=4"]).value.steps == 4

    def test_assignments_come_last_and_none_is_not_given(self, write: Write) -> None:
        loaded = load_settings(
            Run, write(SMALL), overrides=["steps=3"], assignments={"steps": 5, "model.width": None, "time": "90m"}
        )
        assert (loaded.value.steps, loaded.value.model.width, loaded.value.time) == (5, 8, Duration(5400))
        assert loaded.origins["steps"] == "command line"

    @pytest.mark.parametrize("override", ["model.num_layers", "=3", "model..width=3", ".steps=3", "my key=3", ""])
    def test_malformed(self, write: Write, override: str) -> None:
        text = message(write(SMALL), override)
        assert text == f"the override {override!r} has no key and value; write it like model.num_layers=24"

    def test_broken_yaml_says_which_and_how(self, write: Write) -> None:
        text = message(write(SMALL), "env.A=[1")
        assert text.endswith("put the value in quotes: env.A='\"...\"'; override env.A=[1")

    @pytest.mark.parametrize(("override", "kind"), [("name.x=1", "name is text"), ("data.0=x", "data is a list")])
    def test_through_a_value_that_is_no_section(self, write: Write, override: str, kind: str) -> None:
        assert f"{kind}, not a section" in message(write(SMALL + "data: [a]\n"), override)


class TestWriting:
    def test_complete_and_loads_back_to_an_equal_value(self, write: Write) -> None:
        text = (
            SMALL
            + 'time: 90m\nenv: {A: "1e-4", B: "two\\nlines\\n", C: "on"}\ndata: [a/b]\noptimizer: {schedule: null}\n'
        )
        run = load_settings(Run, write(text)).value
        written = dump_yaml(run)
        assert "time: 0-01:30:00\n" in written
        assert "learning_rate: 0.001\n" in written  # a default
        assert load_settings(Run, write(written, "again.yaml")).value == run
        assert dump_yaml(load_settings(Run, Path("again.yaml")).value) == written

    def test_fingerprint_depends_on_values_alone(self, write: Write) -> None:
        one = load_settings(Run, write(SMALL + "time: 60\n".replace("60", '"60"'))).value
        same = load_settings(Run, write("time: 1h\nmodel: {width: 8, num_layers: 2}\nname: tiny\n")).value
        other = load_settings(Run, write(SMALL + "time: 2h\n")).value
        assert fingerprint(one) == fingerprint(same) != fingerprint(other)

    def test_fingerprint_is_pinned(self) -> None:
        assert fingerprint(Anything(value={"a": 1, "b": [1.5, "ü"]})) == "351bb8d9"


def test_a_shipped_file_is_extended_by_name(tmp_path: Path):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "site.yaml").write_text("number: 3\ntext: theirs\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "site.yaml").write_text("extends: shipped/site\ntext: mine\n")

    class Site(Settings):
        number: int
        text: str

    loaded = load_settings(Site, tmp_path / "own" / "site.yaml", shipped=tmp_path / "shipped")
    assert loaded.value == Site(number=3, text="mine")
    assert loaded.origins["number"].endswith("shipped/site.yaml:1")
