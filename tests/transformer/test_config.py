from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from scaling_slurm.settings import fingerprint
from scaling_slurm.transformer.config import ModelConfig, RunConfig
from tests.support.language_model import small_config

RUN: dict[str, Any] = {  # written out, since a golden value hangs on each of them
    "name": "small",
    "model": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "sequence_length": 8,
    },
    "data": {"train": "data/train"},
    "trainer": {"num_steps": 10, "global_batch_size": 16},
}


def run_config(**changes: object) -> RunConfig:
    return RunConfig.model_validate(RUN | changes)


@pytest.mark.parametrize(("given", "heads"), [(None, 4), (2, 2), (1, 1)])
def test_key_value_heads(given: int | None, heads: int) -> None:
    config = small_config(num_key_value_heads=given)
    assert (config.key_value_heads, config.head_size) == (heads, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size 30 is not divisible by num_attention_heads 4"),
        ({"hidden_size": 20}, "hidden_size / num_attention_heads = 5 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer": RUN["trainer"] | {"evaluation_interval": 5}},
            "evaluation_interval is set, but data.validation is not",
        ),
        ({"name": "../outside"}, "should match pattern"),
        ({"name": "x" * 65}, "should match pattern"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_config(**changes)


def test_a_warm_up_as_long_as_the_run_is_allowed() -> None:
    assert run_config(optimizer={"warmup_steps": 10}).optimizer.warmup_steps == 10


def test_paths_become_absolute_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/someone")
    config = run_config(data={"train": "data/train", "validation": "~/validation"})
    absolute = config.with_absolute_paths()
    assert absolute.data.train == tmp_path / "data" / "train"
    assert absolute.data.validation == Path("/someone/validation")
    assert absolute.data.tokenizer is None
    assert absolute.model_dump(exclude={"data"}) == config.model_dump(exclude={"data"})
    assert config.data.train == Path("data/train"), "the given one is left alone"


def test_the_fingerprint_of_the_same_settings_never_changes() -> None:
    """The default run directory's name hangs on it: another value, and `scaling train` would not find its run."""
    assert fingerprint(run_config()) == "67e6e617"
    assert fingerprint(run_config(optimizer={"warmup_steps": 0})) == "67e6e617", "a default that is written out"
    assert fingerprint(run_config(optimizer={"warmup_steps": 1})) != "67e6e617"


def test_settings_are_read_back_from_their_own_dump() -> None:
    config = run_config()
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert ModelConfig.model_validate(config.model.model_dump()) == config.model
