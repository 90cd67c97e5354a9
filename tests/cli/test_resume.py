"""`scaling resume`: its options reach the next job."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scaling_slurm.cli.resume import resume
from scaling_slurm.run_directory import RunDirectory, read_lines, record_end
from tests.support.run_records import add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")

app = Typer()
app.command()(resume)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that were sent, each as job 8; the job before is gone."""
    scripts: list[str] = []

    def send(folder: Path, script: str, *_: object, **__: object) -> str:
        scripts.append(script)
        return "8"

    monkeypatch.setattr("scaling_slurm.launch.submit.send", send)
    monkeypatch.setattr("scaling_slurm.slurm.commands.Slurm.test_only", lambda self, script: "")
    let_scheduler_know(monkeypatch, {"7": "TIMEOUT"})
    return scripts


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = make_run(tmp_path)
    add_job(run, "7", account="project")
    return run


def test_a_dry_run_shows_what_would_be_sent(run: RunDirectory, sent: list[str]):
    files = sorted(run.path.rglob("*"))
    shown = call("7", "--dry-run", "--time", "45").stdout
    assert sent == []
    assert sorted(run.path.rglob("*")) == files
    call("7", "--time", "45")
    assert shown.endswith("\n\n" + sent[0])
    assert "#SBATCH --time=0-00:45:00\n" in sent[0]
    assert "#SBATCH --account=project\n" in sent[0]


def test_options_change_the_next_job(run: RunDirectory, sent: list[str]):
    options = ["--nodes", 2, "--account", "b", "--partition", "p", "--sbatch", "exclusive", "trainer.seed=3"]
    done = call("small-1", *options)
    first, second = done.stdout.splitlines()
    assert first == "job 8 on local continues run small-1 from the start: it has no checkpoint"
    assert second == "follow     scaling logs -f small-1"
    for line in ("nodes=2", "account=b", "partition=p", "exclusive"):
        assert f"#SBATCH --{line}\n" in sent[0]
    assert "  seed: 3\n" in run.config_file.read_text()
    assert [job["job_id"] for job in read_lines(run.jobs_file)] == ["7", "8"]


def test_quiet_prints_the_job_id_alone(run: RunDirectory, sent: list[str]):
    assert call(run.path, "-q").stdout == "8\n"


def test_a_finished_run_is_no_error_and_may_go_on(run: RunDirectory, sent: list[str]):
    record_end(run, run.claim_attempt(), "finished", 10)
    done = call("small-1")
    assert (done.stdout, done.stderr) == ("", "small-1 is finished: step 10; trainer.num_steps=N goes on\n")
    assert sent == []
    call("small-1", "trainer.num_steps=20")
    assert len(sent) == 1
