"""Carrying out a plan: what a submission leaves, what a refused one does not."""

import json
import subprocess
from pathlib import Path

import pytest

import scaling_slurm
from scaling_slurm.errors import ConfigError, RefusedError, SchedulerRefusedError
from scaling_slurm.launch.plan import JobPlan
from scaling_slurm.launch.runs import find_run, status_of
from scaling_slurm.launch.submit import record_code, submit
from scaling_slurm.run_directory import RunDirectory, read_lines
from scaling_slurm.slurm.cluster import load_cluster
from scaling_slurm.slurm.commands import Slurm
from tests.support.plans import plan_in
from tests.support.run_records import add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")


def local_plan(folder: Path, *overrides: str, **options: object) -> JobPlan:
    """A job that ends at once: its Python is `true`."""
    cluster = load_cluster("local", overrides=["python='true'"])
    return plan_in(folder, cluster, "allocation.nodes=1", *overrides, **options)


@pytest.mark.usefixtures("local_scheduler")
def test_a_submission_writes_what_was_planned(tmp_path: Path):
    plan, job_id = submit(lambda: local_plan(tmp_path))
    run = find_run(job_id)
    assert run.path == plan.run_directory
    assert run.script_file.read_text() == plan.script
    [job] = read_lines(run.jobs_file)
    assert (job["job_id"], job["cluster"]) == (job_id, "local")
    assert [event["event"] for event in read_lines(run.events_file)] == ["submitted"]
    assert status_of([run])[0].job_id == job_id


@pytest.mark.usefixtures("local_scheduler")
def test_a_number_that_was_taken_meanwhile_is_planned_anew(tmp_path: Path):
    plans: list[JobPlan] = []

    def make_plan() -> JobPlan:
        plans.append(local_plan(tmp_path))
        if len(plans) == 1:
            plans[0].run_directory.mkdir(parents=True)  # another submitter, at this very moment
        return plans[-1]

    sent, _ = submit(make_plan)
    assert [plan.run_id[-2:] for plan in plans] == ["-1", "-2"]
    assert sent is plans[1]
    assert not list(plans[0].run_directory.iterdir()), "the other's directory is left alone"


def test_a_name_that_was_chosen_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slurm, "test_only", lambda self, script: "")
    run = make_run(tmp_path, "mine")
    with pytest.raises(RefusedError, match=r"the run mine exists already.*`scaling resume mine`.*--name"):
        submit(lambda: local_plan(tmp_path, run_id="mine"))
    add_job(run, "7")
    let_scheduler_know(monkeypatch, {"7": "RUNNING"})
    with pytest.raises(RefusedError, match="mine is live"):
        submit(lambda: local_plan(tmp_path, run_id="mine"))


def refuse(*_: object, **__: object) -> None:
    raise SchedulerRefusedError("no")


@pytest.mark.parametrize("moment", ["test", "sbatch", "interrupt"])
def test_a_refused_submission_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Slurm, "test_only", refuse if moment == "test" else lambda self, script: "")
    monkeypatch.setattr("scaling_slurm.launch.submit.send", interrupt if moment == "interrupt" else refuse)
    with pytest.raises(KeyboardInterrupt if moment == "interrupt" else SchedulerRefusedError):
        submit(lambda: local_plan(tmp_path))
    assert not list(tmp_path.glob("runs/*"))
    assert not (tmp_path / "home").exists()


def test_the_first_problem_is_raised_before_anything_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slurm, "test_only", refuse)
    with pytest.raises(ConfigError, match=r"none\.bin and"):
        submit(lambda: local_plan(tmp_path, f"data.train={tmp_path}/none"))
    with pytest.raises(ConfigError, match="no path"):
        submit(lambda: local_plan(tmp_path, f"data.train={tmp_path}/none", run_id="a/b"))
    assert not (tmp_path / "runs").exists()


# The code


def test_the_code_of_an_installed_package_is_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scaling_slurm, "__file__", str(tmp_path / "site" / "scaling_slurm" / "__init__.py"))
    record_code(RunDirectory(tmp_path))
    record = json.loads(RunDirectory(tmp_path).code_file.read_text())
    assert record == {"version": scaling_slurm.__version__, "path": str(tmp_path / "site")}
    assert not RunDirectory(tmp_path).code_patch.exists()


def test_the_code_of_a_checkout_is_its_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkout = tmp_path / "checkout"
    package = checkout / "scaling_slurm" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("old\n")

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "trunk")
    monkeypatch.setattr(scaling_slurm, "__file__", str(package))
    run = RunDirectory(tmp_path)
    record_code(run)
    assert json.loads(run.code_file.read_text())["commit"] == "", "no commit yet"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    package.write_text("new\n")
    (checkout / "notes.txt").touch()
    record_code(run)
    record = json.loads(run.code_file.read_text())
    assert record["commit"] == git("rev-parse", "HEAD")
    assert (record["branch"], record["untracked"]) == ("trunk", ["notes.txt"])
    git("checkout", "-q", ".")
    git("apply", str(run.code_patch))
    assert package.read_text() == "new\n", "commit and patch give back the code that ran"
    monkeypatch.setattr("scaling_slurm.launch.submit.PATCH_LIMIT_BYTES", 10)
    run.code_patch.unlink()
    record_code(run)
    assert "left out" in json.loads(run.code_file.read_text())["patch"]
    assert not run.code_patch.exists()
