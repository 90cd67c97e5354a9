"""`scaling submit`: what it prints, what a dry run does not do, and what it does not load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.submit import submit
from scaling_slurm.errors import ConfigError
from tests.support.plans import write_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(submit)


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run file in the working directory, and the scripts that were sent, each as job 8."""
    scripts: list[str] = []

    def send(folder: Path, script: str, *_: object, **__: object) -> str:
        scripts.append(script)
        return "8"

    monkeypatch.setattr("scaling_slurm.launch.submit.send", send)
    monkeypatch.setattr("scaling_slurm.slurm.commands.Slurm.test_only", lambda self, script: "")
    write_run(tmp_path)
    return scripts


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["small.yaml", *arguments])


def test_where_the_run_is_and_how_to_follow_it(sent: list[str], tmp_path: Path):
    lines = call("--name", "mine").stdout.splitlines()
    assert lines == [
        "job 8 on local: run mine",
        f"directory  {tmp_path}/runs/mine",
        "follow     scaling logs -f mine",
    ]
    assert f"run={tmp_path}/runs/mine\n" in sent[0]


def test_quiet_prints_the_job_id_alone(sent: list[str]):
    assert call("-q").stdout == "8\n"


def test_a_dry_run_shows_the_script_and_writes_nothing(sent: list[str], tmp_path: Path):
    shown = call("--dry-run", "--time", "90").stdout
    assert sent == []
    assert not (tmp_path / "runs").exists()
    call("--time", "90")
    assert shown.endswith("\n\n" + sent[0])


def test_the_cluster_may_come_from_the_environment(sent: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCALING_CLUSTER", "booster")
    assert "account" in str(call().exception)
    assert "charged to         account me, partition booster" in call("--dry-run", "--account", "me").stdout


def test_what_is_not_ready_here_refuses_a_submission_only(sent: list[str], tmp_path: Path):
    shown = call("--dry-run", "data.train=none")
    assert shown.exit_code == 0
    assert shown.stderr.startswith(f"not ready to submit: {tmp_path}/none.bin and {tmp_path}/none.idx not found")
    refused = call("data.train=none")
    assert isinstance(refused.exception, ConfigError)
    assert "none.bin" in str(refused.exception)
    assert sent == []


@pytest.mark.parametrize("arguments", [["submit", "small.yaml", "--dry-run"], ["status"], ["clusters"]])
def test_on_a_login_node_torch_is_not_loaded(tmp_path: Path, arguments: list[str]):
    write_run(tmp_path)
    code = f"""
import sys
sys.argv = ["scaling", *{arguments!r}]
from scaling_slurm.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"
