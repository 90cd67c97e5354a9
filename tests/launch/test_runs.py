"""Finding runs, and what is known of them with and without a scheduler."""

import json
import shutil
from pathlib import Path

import pytest

from scaling_slurm.errors import ConfigError, NotFoundError, RefusedError, SchedulerUnreachableError
from scaling_slurm.launch.runs import (
    find_run,
    list_runs,
    refuse_live,
    register,
    registry_file,
    runs_root,
    slurm_of,
    status_of,
)
from scaling_slurm.run_directory import RunDirectory, append_line, record_end
from scaling_slurm.slurm.cluster import ClusterProfile, load_cluster
from scaling_slurm.slurm.commands import Slurm
from tests.support.plans import write_cluster
from tests.support.run_records import add_attempt, add_failure, add_job, let_scheduler_know, make_run

pytestmark = pytest.mark.usefixtures("own_home")


def step_to(run: RunDirectory, step: int) -> None:
    append_line(run.metrics_file, {"kind": "training", "step": step, "tokens": 10.0, "step_seconds": 2.0})
    append_line(run.metrics_file, {"kind": "evaluation", "step": 0})


# Where runs are


def test_the_folder_of_runs_is_named_in_four_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DISK", "/disk")
    site = write_cluster(tmp_path, runs_directory="$DISK/${DISK}/runs").value
    assert runs_root(None) == tmp_path / "runs"
    assert runs_root(None, site) == Path("/disk/disk/runs")
    monkeypatch.setenv("SCALING_RUNS", "here")
    assert runs_root(None, site) == tmp_path / "here"
    assert runs_root(Path("there"), site) == tmp_path / "there"


def test_a_folder_with_an_unset_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PROJECT", raising=False)
    site: ClusterProfile = write_cluster(tmp_path, runs_directory="$PROJECT/runs").value
    with pytest.raises(
        ConfigError, match=r"\$PROJECT/runs holds a variable that is not set; export it.*profile of site"
    ):
        runs_root(None, site)


@pytest.mark.parametrize("token", ["small-2", "runs/small-2", "./runs/small-2/", "72", "71", "absolute"])
def test_a_run_is_found_by_name_directory_and_any_of_its_jobs(tmp_path: Path, token: str):
    for number in (1, 2, 3):
        run = make_run(tmp_path, f"small-{number}")
        add_job(run, f"{number + 5}1")
        add_job(run, f"{number + 5}2")
    found = find_run(str(tmp_path / "runs" / "small-2") if token == "absolute" else token)
    assert found.path == tmp_path / "runs" / "small-2"


def test_a_run_elsewhere_is_found_through_the_registry_while_it_is_there(tmp_path: Path):
    far = make_run(tmp_path / "far", "far-1")
    register("9", "local", far)
    register("9", "local", RunDirectory(tmp_path / "gone"))
    assert find_run("9") == find_run("far-1") == far
    shutil.rmtree(far.path)
    make_run(tmp_path)
    with pytest.raises(NotFoundError, match=r"no run or job '9' under .*/runs; the newest ones there: small-1; --runs"):
        find_run("9")


def test_a_registry_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "home").touch()
    register("9", "local", make_run(tmp_path))
    assert registry_file() == tmp_path / "home" / "jobs.jsonl"


def test_other_folders_are_no_runs(tmp_path: Path):
    assert list_runs(tmp_path / "runs") == []
    second, first = make_run(tmp_path, "z"), make_run(tmp_path, "a")
    (tmp_path / "runs" / "notes").mkdir()
    assert list_runs(tmp_path / "runs") == [second, first], "oldest first"


def test_the_local_cluster_has_programs_of_its_own():
    assert (slurm_of(load_cluster("local").value).path_prefix or Path("x")).joinpath("sbatch").exists()
    assert slurm_of(load_cluster("booster").value).path_prefix is None


# How they are


def test_one_question_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = [make_run(tmp_path, f"r{number}", cluster=name) for number, name in enumerate(("local", "slurm", "local"))]
    for number, run in enumerate(runs):
        add_job(run, str(number))
    asked = let_scheduler_know(monkeypatch, {"0": "RUNNING", "1": "PENDING", "2": "FAILED"})
    step_to(runs[0], 4)
    states = status_of([*runs, make_run(tmp_path, "never-sent")])
    assert [status.state for status in states] == ["RUNNING", "PENDING", "FAILED", "UNKNOWN"]
    assert asked == [["0", "2"], ["1"]]
    assert (states[0].step, states[0].num_steps, states[0].tokens_per_second) == (4, 10, 5.0)
    assert [status.is_live for status in states] == [True, True, False, False]
    assert states[1].reason == "Priority"


def test_without_a_scheduler_the_directory_still_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def away(self: Slurm, job_ids: list[str]) -> None:
        raise SchedulerUnreachableError("away")

    monkeypatch.setattr(Slurm, "jobs", away)
    run = make_run(tmp_path)
    add_job(run, "7")
    step_to(run, 10)
    [status] = status_of([run])
    assert (status.state, status.step, status.reason) == ("UNKNOWN", 10, "the scheduler cannot be reached")
    record_end(run, run.claim_attempt(), "finished", 10)
    [status] = status_of([run])
    assert (status.state, status.attempts) == ("FINISHED", 1)


def test_the_last_attempt_says_why_a_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path)
    add_job(run, "7")
    states = {"7": "FAILED"}
    let_scheduler_know(monkeypatch, states)
    add_attempt(run, "7", "stop_file")
    status = status_of([run])[0]
    assert (status.state, status.reason) == ("STOPPED", "on request; `scaling resume` continues it")
    add_failure(add_attempt(run, "7"), 3, "ValueError: bad")
    status = status_of([run])[0]
    assert (status.state, status.reason) == ("FAILED", "rank 3 on node1 failed: ValueError: bad")
    states["7"] = "RUNNING"
    assert status_of([run])[0].reason == "Priority", "an earlier failure is no news of a run that goes on"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "STAGE_OUT", "A_NEW_ONE"])
def test_a_live_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str):
    run = make_run(tmp_path)
    add_job(run, "7")
    states = {"7": state}
    let_scheduler_know(monkeypatch, states)
    run.finished_file.write_text(json.dumps({"step": 10}))
    with pytest.raises(RefusedError, match=f"small-1 is live: job 7 is {state}"):
        refuse_live(run)
    states["7"] = "COMPLETED"
    refuse_live(run)
    assert status_of([run])[0].state == "FINISHED"
