"""`scaling cancel`: a running job saves first, a waiting one leaves the queue."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from scaling_slurm.cli.cancel import cancel
from scaling_slurm.run_directory import RunDirectory, read_lines
from scaling_slurm.slurm.commands import Slurm
from tests.support.run_records import add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(cancel)


def call(folder: Path, patch: pytest.MonkeyPatch, state: str, *options: str) -> tuple[RunDirectory, list[str], str]:
    """The run, the jobs that the scheduler was told to end, and what was said."""
    cancelled: list[str] = []
    patch.setattr(Slurm, "cancel", lambda self, job_id: cancelled.append(job_id))
    run = make_run(folder)
    add_job(run, "7")
    let_scheduler_know(patch, {"7": state})
    done = CliRunner().invoke(app, ["small-1", *options], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "")
    return run, cancelled, done.stderr


def test_a_running_job_saves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, cancelled, said = call(tmp_path, monkeypatch, "RUNNING")
    assert run.stop_file.exists()
    assert cancelled == []
    assert "`scaling cancel --now small-1` does not wait" in said
    [event] = read_lines(run.events_file)
    assert (event["event"], event["job_id"], event["now"]) == ("cancel", "7", False)


@pytest.mark.parametrize(("state", "options"), [("RUNNING", ["--now"]), ("PENDING", []), ("SUSPENDED", [])])
def test_otherwise_the_scheduler_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, options: list[str]
):
    run, cancelled, said = call(tmp_path, monkeypatch, state, *options)
    assert cancelled == ["7"]
    assert run.stop_file.exists(), "a requeue that is on its way stops too"
    assert said == "cancelled job 7 of small-1 (scancel 7)\n"


def test_a_run_that_is_over_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, cancelled, said = call(tmp_path, monkeypatch, "FAILED", "--now")
    assert cancelled == []
    assert not run.stop_file.exists(), "it would stop the next job"
    assert said == "small-1 is not live: it is FAILED\n"
