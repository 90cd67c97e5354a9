"""`scaling logs`: a log on stdout, why it ended on stderr."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.logs import logs
from scaling_slurm.errors import JobFailedError, NotFoundError
from tests.support.run_records import add_attempt, add_failure, add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(logs)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts: the first one failed, the second one was stopped."""
    run = make_run(tmp_path)
    add_job(run, "7")
    add_failure(add_attempt(run, "7", log="one\n"), 0, "ValueError: bad")
    add_attempt(run, "7", "stop_file", "two\n")
    (run.logs / "attempt-002-rank-00001.log").write_bytes(b"caf\xe9\n")
    let_scheduler_know(monkeypatch, {"7": "COMPLETED"})


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ([], "two\n", ""),
        (["--rank", "1"], "caf\ufffd\n", ""),
        (["--attempt", "1"], "one\n", "attempt 1: rank 0 on node1 failed: ValueError: bad\n"),
        (["-f"], "two\n", ""),
    ],
)
def test_which_log(options: list[str], out: str, err: str):
    done = call("small-1", *options)
    assert (done.exit_code, done.stdout, done.stderr) == (0, out, err)


def test_what_is_not_there():
    assert isinstance(call("small-1", "--attempt", "3").exception, NotFoundError)
    assert isinstance(call("small-2").exception, NotFoundError)
    assert call("small-1", "--attempt", "0").exit_code == 2


def test_following_a_failed_job_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path, "small-2")
    add_job(run, "8")
    add_failure(add_attempt(run, "8", log="one\n"), 0, "ValueError: bad")
    let_scheduler_know(monkeypatch, {"8": "FAILED"})
    done = call("8", "-f")
    assert done.stdout == "one\n"
    assert isinstance(done.exception, JobFailedError)
    assert "ValueError: bad" in str(done.exception)
