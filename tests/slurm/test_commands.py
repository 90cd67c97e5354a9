"""Slurm's programs: which are asked, what their failures mean, and that nobody waits for ever."""

import os
import time
from pathlib import Path

import pytest

from scaling_slurm.errors import ConfigError, SchedulerRefusedError, SchedulerUnreachableError
from scaling_slurm.slurm.commands import Slurm, explain_refusal, parse_job_id, scrubbed_environment
from tests.support.slurm import wait_for_job, wait_until
from tests.support.slurm_lab import SlurmLab

QUICK = Slurm(pauses=(0.0, 0.0))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory first on PATH, for stand-ins that count their calls."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f'#!/bin/sh\necho "$*" >> {folder}/{name}.calls\n{body}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_live_jobs_take_one_call(programs: Path) -> None:
    lines = "7|7|RUNNING|None|n1|N/A|N/A|5:00\n8|8|PENDING|Priority||N/A|N/A|5:00"
    write_program(programs, "squeue", f"echo '{lines}'")
    found = QUICK.jobs(["7", "8", "7"])
    assert {job_id: info.state for job_id, info in found.items()} == {"7": "RUNNING", "8": "PENDING"}
    assert len(calls(programs, "squeue")) == 1
    assert "--jobs=7,8 " in calls(programs, "squeue")[0]


def test_a_finished_job_is_asked_for_its_exit_code(programs: Path) -> None:
    write_program(programs, "squeue", "echo '7|7|FAILED|NonZeroExitCode|n1|N/A|N/A|5:00'")
    shown = "JobId=7 JobName=x UserId=me(1) JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=3:0 NodeList=n1"
    write_program(programs, "scontrol", f"echo '{shown}'")
    info = QUICK.job("7")
    assert info is not None
    assert (info.state, info.exit_code, info.restarts, info.source) == ("FAILED", 3, 1, "scontrol")


def test_a_forgotten_job_is_in_the_database(programs: Path) -> None:
    for name in ("squeue", "scontrol"):
        write_program(programs, name, UNKNOWN)
    write_program(programs, "sacct", "echo '7|7|TIMEOUT|0:0|Unknown|Unknown|05:00:00|n1'")
    info = QUICK.job("7")
    assert info is not None
    assert (info.state, info.source) == ("TIMEOUT", "sacct")


@pytest.mark.parametrize("sacct", [None, "echo 'Slurm accounting storage is disabled' >&2; exit 1", ""])
def test_unknown_job(programs: Path, sacct: str | None) -> None:
    for name in ("squeue", "scontrol"):
        write_program(programs, name, UNKNOWN)
    if sacct is not None:
        write_program(programs, "sacct", sacct)
    assert QUICK.job("7") is None


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "squeue: error: Socket timed out on send/recv operation",
        "squeue: fatal: Unable to process configuration file",
        "squeue: fatal: Could not establish a configuration source",
    ],
)
def test_no_answer_is_tried_again_and_then_said(programs: Path, words: str) -> None:
    write_program(programs, "squeue", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachableError) as raised:
        QUICK.job("7")
    assert words.removeprefix("squeue: ").removeprefix("error: ").removeprefix("fatal: ") in str(raised.value)
    assert "is this a login node, and is SLURM_CONF right?" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(calls(programs, "squeue")) == 3


def test_an_answer_after_a_failure(programs: Path) -> None:
    write_program(
        programs, "squeue",
        f"[ $(wc -l < {programs}/squeue.calls) -gt 1 ] || {{ echo Connection refused >&2; exit 1; }}\n"
        "echo '7|7|RUNNING|None|n1|N/A|N/A|5:00'",
    )  # fmt: skip
    info = QUICK.job("7")
    assert info is not None
    assert info.state == "RUNNING"


def test_time_out(programs: Path) -> None:
    write_program(programs, "squeue", "exec sleep 5")
    with pytest.raises(SchedulerUnreachableError, match=r"no answer within 0\.1 s"):
        Slurm(pauses=(), timeout=0.1).job("7")


def test_without_slurm(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(SchedulerUnreachableError, match="squeue is not on PATH"):
        QUICK.job("7")


@pytest.mark.parametrize("text", ["", "7;rm", "-1", "7_", "7.0", "7\n", "\u0667", "--help"])
def test_job_ids_are_checked_before_anything_runs(programs: Path, text: str) -> None:
    for question in (QUICK.job, QUICK.cancel, QUICK.seconds_left):
        with pytest.raises(ConfigError, match="not a job id"):
            question(text)
    assert parse_job_id("123_4") == "123_4"


def test_environment_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/x.conf")
    environ = Slurm(path_prefix=Path("/first")).environment()
    assert environ["PATH"].startswith("/first:")
    assert (environ["SLURM_TIME_FORMAT"], environ["LC_ALL"], environ["SLURM_CONF"]) == ("standard", "C", "/etc/x.conf")
    assert "SLURM_JOB_ID" not in environ


def test_names_that_only_look_alike_are_kept() -> None:
    names = ["RANKING", "MY_RANK", "PMID", "MASTER_PORTAL", "SLURMY", "SCALING_HOME", "OMP_NUM_THREADS"]
    kept = dict.fromkeys(names, "1")
    assert scrubbed_environment(kept | {"RANK": "1", "SLURM_X": "1"}) == kept


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
         "set account"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "set qos"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         "allocation.time"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "allocation.nodes"),
        ("sbatch: error: Memory specification can not be satisfied\n"
         "sbatch: error: Batch job submission failed: Requested node configuration is not available", "set memory"),
        ("allocation failure: Requested node configuration is not available", "scontrol show node"),
        ("sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification", "GPUs"),
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates"
         " accounting/QOS policy (job submit limit, user's size and/or time limits)", "another account"),
        ("sbatch: error: Batch job submission failed: Requested reservation is invalid", "look at --sbatch"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "look at --sbatch"),
        ("sbatch: error: invalid partition specified: nope", "or by --partition"),
        ("sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more information", "extra directives"),
    ],
)  # fmt: skip
def test_refusals_name_what_to_change(words: str, hint: str) -> None:
    error = explain_refusal(words)
    assert isinstance(error, SchedulerRefusedError)
    assert hint in str(error)
    assert "\n" not in str(error)
    assert words.splitlines()[-1].removeprefix("sbatch: ").removeprefix("error: ") in str(error)


def test_a_long_story_of_no_answer_is_one_line() -> None:
    story = (
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: fatal: Could not establish a configuration source\n"
    )
    error = explain_refusal(story)
    assert isinstance(error, SchedulerUnreachableError)
    assert str(error).startswith("Slurm did not answer: Could not establish a configuration source; check squeue")
    assert str(error).endswith("is this a login node, and is SLURM_CONF right?")


@pytest.mark.slurm
def test_life_of_a_real_job(on_slurm: SlurmLab, tmp_path: Path) -> None:
    slurm = Slurm()
    script = tmp_path / "job"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --time=5 --output={tmp_path}/log --open-mode=append\n"
        "srun bash -c 'trap \"echo got USR2\" USR2; while true; do sleep 0.1; done'\n"
    )
    job_id = on_slurm.run("sbatch", "--parsable", str(script)).strip()
    running = wait_for_job(slurm, job_id, "RUNNING")
    assert running.nodes == tuple(on_slurm.nodes[:2])
    assert running.time_limit == 300.0
    left = slurm.seconds_left(job_id)
    assert left is not None
    assert 280 < left <= 300
    wait_until(lambda: "RUNNING" in on_slurm.run("squeue", "-h", "-s", "-j", job_id, "-o", "%i RUNNING"), "the step")
    log = tmp_path / "log"
    time.sleep(0.5)
    slurm.cancel(job_id, "USR2")
    wait_until(lambda: log.read_text().count("got USR2") == 2, "both tasks to get the signal")
    on_slurm.run("scontrol", "requeue", job_id)
    pending = wait_for_job(slurm, job_id, "PENDING", seconds=20)
    assert slurm.seconds_left(job_id) is None
    assert pending.is_live
    slurm.cancel(job_id)
    ended = wait_for_job(slurm, job_id)
    assert (ended.state, ended.restarts, ended.source) == ("CANCELLED", 1, "scontrol")
    assert slurm.job("999999") is None
    slurm.cancel("999999")


@pytest.mark.slurm
def test_what_a_real_slurm_would_do_with_a_script(on_slurm: SlurmLab) -> None:
    assert "to start at" in Slurm().test_only("#!/bin/sh\n#SBATCH --nodes=2\ntrue\n")
    with pytest.raises(SchedulerRefusedError, match="set partition"):
        Slurm().test_only("#!/bin/sh\n#SBATCH --partition=nope\n")
    with pytest.raises(SchedulerRefusedError, match="unrecognized option"):
        Slurm().test_only("#!/bin/sh\n#SBATCH --foo\n")


@pytest.mark.slurm
def test_a_real_controller_that_is_away(on_slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = tmp_path / "slurm.conf"
    away.write_text(on_slurm.configuration.read_text().replace("SlurmctldPort=", "SlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    assert os.environ["SLURM_CONF"] == str(away)
    with pytest.raises(SchedulerUnreachableError, match=r"squeue got no answer from Slurm in 1 tries"):
        Slurm(pauses=(), timeout=2.0).job("1")
