"""The message for each way that settings can be wrong: the value, what would be right, where it was set."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, PositiveInt, model_validator

from scaling_slurm.errors import ConfigError
from scaling_slurm.settings import Duration, Settings, load_settings
from scaling_slurm.settings_fields import annotation_below, takes_none


class Model(Settings):
    num_layers: PositiveInt
    """Blocks,
    one above the other.
    """
    width: int = 8
    activation: Literal["silu", "gelu"] = "silu"


class Optimizer(Settings):
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    max_steps: int = 100
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


class TestMessages:
    def test_unknown_key_in_the_same_section(self, write: Write) -> None:
        text = message(write(SMALL + "optimizer:\n  learning_rat: 1\n"))
        assert text == "unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?; run.yaml:5"

    def test_unknown_key_that_belongs_to_another_section(self, write: Write) -> None:
        text = message(write(SMALL + "  learning_rate: 1\n"))
        assert text == "unknown key model.learning_rate; did you mean optimizer.learning_rate?; run.yaml:4"

    def test_the_same_name_elsewhere_comes_before_a_like_one_here(self, write: Write) -> None:
        text = message(write(SMALL), "optimizer.steps=1")
        assert text == "unknown key optimizer.steps; did you mean steps?; command line"

    def test_unknown_key_like_no_other(self, write: Write) -> None:
        text = message(write(SMALL), "model.zzz=1")
        assert text == "unknown key model.zzz; known here: num_layers, width, activation; command line"

    def test_unknown_key_inside_a_mapping_of_sections(self, write: Write) -> None:
        text = message(write(SMALL + "partitions:\n  gpu:\n    max_node: 3\n"))
        assert text == "unknown key partitions.gpu.max_node; did you mean partitions.gpu.max_nodes?; run.yaml:6"

    def test_a_dotted_key_in_a_file(self, write: Write) -> None:
        assert (
            message(write(SMALL + "model.width: 3\n")) == "unknown key model.width; write it below model:; run.yaml:4"
        )

    def test_missing_key_names_the_line_of_its_section(self, write: Write) -> None:
        text = message(write("name: tiny\nsteps: 3\nmodel:\n  width: 3\n"), "model.activation=gelu")
        assert text == "model.num_layers is missing; add it: Blocks, one above the other; run.yaml:3"

    def test_missing_section_says_what_it_needs(self, write: Write) -> None:
        assert message(write("name: tiny\n")) == "model is missing; add a section with num_layers; run.yaml:1"

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("steps: many", 'steps is "many"; it should be a valid integer; run.yaml:4'),
            ("enabled: 7", "enabled is 7; it should be a valid boolean; run.yaml:4"),
            ("optimizer: 3", "optimizer is 3; it should be a section with keys of its own; run.yaml:4"),
            ("time: soon", 'time is "soon"; it should be like "24:00:00"'),
            ("env: {A: 2.10}", "env.A is 2.1; it should be text: put quotes around it; run.yaml:4"),
            ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate is Infinity; it should be a finite number"),
            ("partitions: {gpu: {max_nodes: 0}}", "partitions.gpu.max_nodes is 0; it should be greater than 0"),
        ],
    )
    def test_wrong_values(self, write: Write, line: str, expected: str) -> None:
        assert message(write(SMALL + line + "\n")).startswith(expected)

    def test_choices(self, write: Write) -> None:
        text = message(write(SMALL), "model.activation=relu")
        assert text == "model.activation is \"relu\"; it should be 'silu' or 'gelu'; command line"

    def test_pattern_comes_with_the_docstring(self, write: Write) -> None:
        text = message(write(SMALL), "name=Tiny")
        assert text == 'name is "Tiny"; it should match ^[a-z]+$: Small letters.; command line'

    def test_a_check_across_keys_names_both_places(self, write: Write) -> None:
        text = message(write(SMALL + "steps: 5\n"), "optimizer.warmup_steps=6")
        assert text == "optimizer.warmup_steps 6 is above steps 5; command line, run.yaml:4"

    def test_all_problems_a_line_each(self, write: Write) -> None:
        lines = message(write(SMALL), "steps=a", "nme=b", "model.width=c").splitlines()
        assert [line.split(";")[0] for line in lines] == ["unknown key nme", 'model.width is "c"', 'steps is "a"']

    def test_unknown_keys_come_first_for_they_may_be_what_is_missing(self, write: Write) -> None:
        text = message(write("nam: tiny\nmodel:\n  num_layer: 2\n"), "steps=a").splitlines()
        assert [line.split(";")[0] for line in text] == [
            "unknown key model.num_layer", "unknown key nam", "name is missing", "model.num_layers is missing",
            'steps is "a"',
        ]  # fmt: skip

    def test_no_more_than_five(self, write: Write) -> None:
        lines = message(write(SMALL), *[f"zzz{number}=1" for number in range(7)]).splitlines()
        assert len(lines) == 6
        assert lines[-1] == "and 2 more problems"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [(int, False), (int | None, True), (dict[str, int | None], False), (Literal["a"] | None, True), (object, True)],
)
def test_takes_none(annotation: object, expected: bool) -> None:
    assert takes_none(annotation) is expected


def test_annotation_below() -> None:
    assert annotation_below(Run, "steps") is int
    assert annotation_below(Run | None, "steps") is int
    assert annotation_below(dict[str, int | None] | None, "any") == int | None
    assert annotation_below(list[Path], 0) is Path
