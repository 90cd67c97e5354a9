"""`scaling plan` as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.plan import allocation_overrides, parse_directives, plan
from scaling_slurm.errors import ConfigError
from tests.support.plans import LAB, load_run, plan_in

ROOT = Path(__file__).resolve().parents[2]

app = Typer()
app.command()(plan)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_plan_prints_description_and_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALING_ACCOUNT", raising=False)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    load_run(tmp_path)
    done = call(tmp_path / "small.yaml", "--cluster", LAB, "--runs", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n\n" + plan_in(tmp_path).script), "what a plan shows is what Slurm would get"
    assert done.stderr == ""
    assert not (tmp_path / "runs").exists()


def test_options_change_the_allocation(tmp_path: Path) -> None:
    load_run(tmp_path)
    options = ["--nodes", 4, "--time", "30", "--account", "a b", "--partition", "low", "--name", "mine"]
    options += ["--sbatch", "exclusive", "--sbatch", "--reservation=x=y", "--sbatch", "open-mode="]
    done = call(tmp_path / "small.yaml", "trainer.seed=4", "--cluster", LAB, "--runs", tmp_path, *options)
    assert done.exit_code == 0, done.output
    for line in ("nodes=4", "time=0-00:30:00", 'account="a b"', "partition=low", "exclusive", "reservation=x=y"):
        assert f"#SBATCH --{line}\n" in done.stdout
    assert "open-mode" not in done.stdout
    assert f"run={tmp_path}/mine\n" in done.stdout


def test_problems_go_to_stderr_and_decide_the_exit_code(tmp_path: Path) -> None:
    load_run(tmp_path)
    done = call(tmp_path / "small.yaml", "--cluster", LAB, "--partition", "shrot", "--runs", tmp_path)
    assert done.exit_code == 2
    assert "did you mean short?" in done.stderr
    assert "srun" in done.stdout


def test_planning_loads_no_torch(tmp_path: Path) -> None:
    load_run(tmp_path)
    code = (
        "import sys; from scaling_slurm.cli.plan import plan_from_options; "
        f"job = plan_from_options({str(tmp_path / 'small.yaml')!r}, None, {str(LAB)!r}, *[None] * 7); "
        "print(job.run_id, 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.endswith(" False\n")


def test_a_directive_of_the_plan_cannot_be_set_by_hand(tmp_path: Path) -> None:
    load_run(tmp_path)
    done = call(tmp_path / "small.yaml", "--cluster", LAB, "--sbatch", "nodes=3")
    assert isinstance(done.exception, ConfigError)
    assert "nodes" in str(done.exception)


def test_a_time_stays_text() -> None:
    assert allocation_overrides(None, "30") == ['allocation.time="30"']
    assert allocation_overrides(2, None) == ["allocation.nodes=2"]


def test_further_directives() -> None:
    parsed = parse_directives(["--exclusive", "a=b=c", "gres="])
    assert parsed == {"exclusive": True, "a": "b=c", "gres": None}
    assert parse_directives(None) == {}
