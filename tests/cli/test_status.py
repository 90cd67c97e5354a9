"""`scaling status`: a table for people, a line of JSON for programs."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.status import status
from scaling_slurm.run_directory import append_line
from tests.support.run_records import add_attempt, add_failure, add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(status)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going, failed = make_run(tmp_path, "going-1"), make_run(tmp_path, "failed-10")
    add_job(going, "17")
    add_attempt(going, "17", "preempted", requeue=True)
    add_attempt(going, "17")
    append_line(
        going.metrics_file, {"kind": "training", "step": 4, "loss": 2.5, "tokens": 24690.0, "step_seconds": 2.0}
    )
    add_job(failed, "9")
    add_failure(add_attempt(failed, "9"), 3, "ValueError: bad")
    let_scheduler_know(monkeypatch, {"17": "RUNNING", "9": "FAILED"})


def test_the_table_is_aligned_and_has_a_row_for_each_run():
    lines = call().stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["RUN", "JOB", "STATE", "STEP", "LOSS", "TOKENS/S", "ATTEMPTS", "REASON"],
        ["going-1", "17", "RUNNING", "4/10", "2.5000", "12,345", "2", "Priority"],
    ]
    assert lines[2].startswith("failed-10  9    FAILED   0/10                    1         rank 3 on node1 failed: Val")
    assert len({line.index(word) for line, word in zip(lines, ("STATE", "RUNNING", "FAILED"), strict=True)}) == 1


def test_json_is_a_line_for_each_run(tmp_path: Path):
    done = call("--json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records[0] == {
        "run": "going-1",
        "directory": str(tmp_path / "runs" / "going-1"),
        "job_id": "17",
        "state": "RUNNING",
        "step": 4,
        "num_steps": 10,
        "loss": 2.5,
        "tokens_per_second": 12345.0,
        "attempts": 2,
        "reason": "Priority",
    }
    assert (records[1]["state"], records[1]["tokens_per_second"]) == ("FAILED", None)


@pytest.mark.parametrize("token", ["9", "failed-10", "./runs/failed-10"])
def test_one_run(token: str):
    assert [json.loads(line)["run"] for line in call(token, "--json").stdout.splitlines()] == ["failed-10"]


def test_no_runs_are_no_error(tmp_path: Path):
    done = call("--runs", str(tmp_path / "none"))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"no runs under {tmp_path}/none\n")
    assert call("--runs", str(tmp_path / "none"), "--json").stdout == ""
