"""`scaling config`: what it prints can be run again, and says where each value came from."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scaling_slurm.cli.main import app
from scaling_slurm.errors import ConfigError
from scaling_slurm.resources import list_names
from scaling_slurm.settings import load_settings
from scaling_slurm.transformer.config import RunConfig


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_show_prints_a_complete_file_that_loads_to_the_same(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(invoke("show", "tiny", "model.num_layers=3", "optimizer.learning_rate=1e-2"))
    run = load_settings(RunConfig, shown).value
    assert run.model.num_layers == 3
    assert run.optimizer.learning_rate == 1e-2
    assert (
        run
        == load_settings(
            RunConfig, list_names("configs")["tiny"], overrides=["model.num_layers=3", "optimizer.learning_rate=1e-2"]
        ).value
    )
    assert "max_node_failures: 10" in shown.read_text()


def test_show_with_origins(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(invoke("show", "tiny", "data.tokenizer=t.json"))
    run = tmp_path / "run.yaml"
    run.write_text("extends: base.yaml\ntrainer:\n  num_steps: 30\n")
    lines = dict(line.split("  # ") for line in invoke("show", str(run), "trainer.seed=4", "--origin").splitlines())
    origins = {text.strip(): origin for text, origin in lines.items()}
    assert origins["trainer.num_steps: 30"] == f"{run}:3"
    assert origins["trainer.seed: 4"] == "command line"
    assert origins['data.tokenizer: "t.json"'].startswith(f"{tmp_path / 'base.yaml'}:")
    assert "default" not in origins.values()  # base.yaml is complete


def test_show_marks_defaults() -> None:
    lines = invoke("show", "tiny", "--origin").splitlines()
    assert any(line.startswith("optimizer.beta1: 0.9 ") and line.endswith("# default") for line in lines)


def test_an_unknown_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        invoke("show", "tinny")


@pytest.mark.parametrize(("of", "key"), [("run", "trainer"), ("cluster", "partitions")])
def test_schema(of: str, key: str) -> None:
    schema = json.loads(invoke("schema", of))
    assert {key, "extends"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_schema_of_something_else_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no schema of 'nope'; there are run, .*and cluster"):
        invoke("schema", "nope")


def test_schema_explains_settings_by_their_docstrings() -> None:
    schema = json.loads(invoke("schema"))
    assert "accumulation" in schema["$defs"]["TrainerConfig"]["properties"]["global_batch_size"]["description"]
    time = schema["$defs"]["AllocationConfig"]["properties"]["time"]["anyOf"]
    assert [option["type"] for option in time] == ["string", "null"]


@pytest.mark.parametrize("name", list_names("configs"))
def test_every_shipped_run_file_is_valid(name: str) -> None:
    load_settings(RunConfig, list_names("configs")[name])
