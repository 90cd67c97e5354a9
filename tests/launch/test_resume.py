"""The next job of a run: what it takes over, what may change, and that there is only one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaling_slurm.errors import ConfigError, RefusedError, SchedulerRefusedError
from scaling_slurm.launch.resume import Changes, is_finished, plan_resume, resume
from scaling_slurm.run_directory import RunDirectory, read_lines, record_end
from scaling_slurm.slurm.commands import Slurm
from tests.support.plans import LAB, load_run
from tests.support.run_records import add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")


def test_the_next_job_is_like_the_last_one(tmp_path: Path):
    run = make_run(tmp_path, "small-1", "trainer.seed=5", cluster=str(LAB))
    add_job(run, "1", account="first")
    add_job(run, "2", account="project", partition="low")
    job = plan_resume(run, Changes())
    assert (job.run_directory, job.config.trainer.seed, job.cluster.name) == (run.path, 5, "lab")
    assert (job.request.account, job.request.partition) == ("project", "low")


def test_changes_go_on_top(tmp_path: Path):
    run = make_run(tmp_path, cluster=str(LAB))
    add_job(run, "1", account="project", partition="low")
    changes = Changes(["trainer.num_steps=20", "allocation.time='30'"], None, "other", "short", {"exclusive": True})
    job = plan_resume(run, changes)
    assert (job.config.trainer.num_steps, job.request.account, job.request.partition) == (20, "other", "short")
    assert "#SBATCH --time=0-00:30:00\n" in job.script
    assert "#SBATCH --exclusive\n" in job.script
    elsewhere = plan_resume(run, Changes(cluster="local"))
    assert elsewhere.request.partition is None, "another cluster has other partitions and accounts"
    assert elsewhere.request.account is None


@pytest.mark.parametrize(
    ("override", "section"),
    [("model.num_layers=3", "model"), ("name=other", "name"), ("trainer.precision=float64", r"trainer\.precision")],
)
def test_another_model_is_another_run(tmp_path: Path, override: str, section: str):
    with pytest.raises(RefusedError, match=f"{section} of small-1 cannot change.*scaling submit"):
        plan_resume(make_run(tmp_path), Changes([override]))


def test_a_moved_run_continues_where_it_is(tmp_path: Path):
    run = make_run(tmp_path)
    moved = RunDirectory(run.path.rename(tmp_path / "moved"))
    job = plan_resume(moved, Changes())
    assert f"run={tmp_path}/moved\n" in job.script
    assert str(run.path) not in job.script


@pytest.mark.parametrize(("done", "wanted", "finished"), [(10, 10, True), (10, 11, False), (None, 10, False)])
def test_a_run_is_finished_at_the_last_step_of_its_settings(
    tmp_path: Path, done: int | None, wanted: int, finished: bool
):
    run = make_run(tmp_path)
    if done is not None:
        record_end(run, run.claim_attempt(), "finished", done)
    assert is_finished(run, load_run(tmp_path, f"trainer.num_steps={wanted}").value) is finished


def test_a_refused_resume_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Slurm, script: str) -> None:
        raise SchedulerRefusedError("no")

    monkeypatch.setattr(Slurm, "test_only", refuse)
    run = make_run(tmp_path)
    run.stop_file.touch()
    settings = run.config_file.read_text()
    for changes, kind in (
        (Changes(["trainer.num_steps=11"]), SchedulerRefusedError),
        (Changes([f"data.train={tmp_path}/none"]), ConfigError),
    ):
        with pytest.raises(kind):
            resume(run, changes)
        assert run.config_file.read_text() == settings
        assert run.stop_file.exists()
        assert not run.jobs_file.exists()


@pytest.mark.usefixtures("local_scheduler")
def test_a_live_run_is_refused_and_a_stop_of_before_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path)
    run.stop_file.touch()
    _, job_id = resume(run, Changes())
    assert not run.stop_file.exists()
    let_scheduler_know(monkeypatch, {job_id: "PENDING"})
    with pytest.raises(RefusedError, match=f"small-1 is live: job {job_id} is PENDING"):
        resume(run, Changes())
    assert len(list(read_lines(run.jobs_file))) == 1


def test_nobody_else_sends_a_job_from_the_look_at_the_run_until_its_job_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path)
    code = (
        "import sys; from scaling_slurm.run_directory import *; from pathlib import Path\n"
        f"with exclusive(RunDirectory(Path({str(run.path)!r})), 'submit'): pass"
    )
    seen: list[str] = []

    def try_meanwhile(*_: object) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        seen.append(other.stderr.splitlines()[-1])

    monkeypatch.setattr("scaling_slurm.launch.resume.refuse_live", try_meanwhile)
    monkeypatch.setattr("scaling_slurm.launch.submit.register", try_meanwhile)
    monkeypatch.setattr("scaling_slurm.launch.submit.send", lambda *_, **__: "7")
    monkeypatch.setattr(Slurm, "test_only", lambda self, script: "")
    resume(run, Changes())
    assert len(seen) == 2
    assert all("RefusedError: another process is at work to submit small-1" in line for line in seen)
