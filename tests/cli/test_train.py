"""`scaling train`: the same command again continues the same run."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.train import train
from scaling_slurm.errors import ConfigError, RefusedError
from scaling_slurm.run_directory import RunDirectory, read_lines
from tests.support.plans import write_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(train)


@pytest.fixture(autouse=True)
def run_file(tmp_path: Path) -> None:
    write_run(tmp_path)


def call(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["small.yaml", *arguments])
    assert done.exception is None or isinstance(done.exception, ConfigError), done.exception
    return done


def steps(run: RunDirectory) -> list[tuple[int, int]]:
    return [(record["attempt"], record["step"]) for record in read_lines(run.metrics_file)]


def test_the_same_command_continues_the_same_run(tmp_path: Path):
    run = RunDirectory(tmp_path / "elsewhere" / "mine")
    call("trainer.num_steps=2", "--run", "elsewhere/mine")
    assert steps(run) == [(1, 1), (1, 2)]
    call("trainer.num_steps=2", "--run", "elsewhere/mine")
    assert steps(run) == [(1, 1), (1, 2)], "it is finished"
    call("trainer.num_steps=3", "--run", "elsewhere/mine")
    assert steps(run) == [(1, 1), (1, 2), (2, 3)]


def test_without_a_name_the_settings_name_the_run(tmp_path: Path):
    for options in (["--runs", "here"], ["--runs", "here"], ["--runs", "here", "trainer.seed=1"]):
        call("trainer.num_steps=1", *options)
    runs = sorted((tmp_path / "here").iterdir())
    assert len(runs) == 2
    assert all(run.name.startswith("small-") for run in runs)
    call("trainer.num_steps=1")
    assert [run.name for run in (tmp_path / "runs").iterdir()] in [[run.name] for run in runs]


def test_another_model_does_not_take_a_run_over(tmp_path: Path):
    call("trainer.num_steps=1", "--run", "mine")
    settings = (tmp_path / "mine" / "config.yaml").read_text()
    done = CliRunner().invoke(app, ["small.yaml", "model.num_layers=3", "trainer.num_steps=2", "--run", "mine"])
    assert isinstance(done.exception, RefusedError)
    assert (tmp_path / "mine" / "config.yaml").read_text() == settings
    assert len(RunDirectory(tmp_path / "mine").list_attempts()) == 1


@pytest.mark.parametrize("arguments", [["model.num_layer=3"], ["topology.tensor_parallel_size=2"]])
def test_a_mistake_is_told(arguments: list[str]):
    assert isinstance(call(*arguments, "--run", "mine").exception, ConfigError)
