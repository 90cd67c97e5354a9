"""Submission: what is refused and how, and what a job needs of the shell that submitted it."""

import re
import subprocess
from pathlib import Path

import pytest

from scaling_slurm.slurm.commands import Slurm
from tests.support.slurm import read_log, submit, wait_for_job


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--foo"], "unrecognized option '--foo'"),
        (["--time=soon"], "Invalid --time specification"),
        (["--nodes=0-x"], "--nodes|node count"),
    ],
)
def test_refusals(any_slurm: str, options: list[str], words: str) -> None:
    Path("job.sh").write_text("#!/bin/sh\n")
    done = subprocess.run(["sbatch", *options, "job.sh"], check=False, capture_output=True, text=True)
    assert done.returncode in (1, 255)
    assert re.search(words, done.stderr)
    assert done.stdout == ""


def test_not_a_script(any_slurm: str) -> None:
    done = subprocess.run(["sbatch"], input="hello\n", check=False, capture_output=True, text=True)
    assert (done.returncode, "does not look like a batch script" in done.stderr) == (1, True)


def test_only_testing_queues_nothing(any_slurm: str) -> None:
    said = Slurm().test_only("#!/bin/sh\n#SBATCH --nodes=2\nfalse\n")
    assert re.fullmatch(r"Job \d+ to start at \S+ using \d+ processors on nodes \S+ in partition \S+", said)
    assert subprocess.check_output(["squeue", "--noheader"]) == b""


def test_arguments_and_waiting_for_the_end(any_slurm: str) -> None:
    Path("job.sh").write_text('#!/bin/bash\n#SBATCH --output=log\necho "$1-$2"; exit 3\n')
    done = subprocess.run(["sbatch", "--wait", "job.sh", "a b", "c"], check=False, capture_output=True, text=True)
    assert done.returncode == 3
    assert re.fullmatch(r"Submitted batch job \d+\n", done.stdout)
    assert read_log() == "a b-c\n"


@pytest.mark.usefixtures("local_scheduler")
def test_what_the_stand_in_cannot_do_is_refused() -> None:
    Path("job.sh").write_text("#!/bin/sh\n")
    for option in ("--array=0-3", "--dependency=afterok:1", "--nodes=300"):
        done = subprocess.run(["sbatch", option, "job.sh"], check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Batch job submission failed" in done.stderr


@pytest.mark.usefixtures("local_scheduler")
def test_job_survives_the_submitting_session() -> None:
    Path("job.sh").write_text("#!/bin/sh\nsleep 1; echo done\n")
    done = subprocess.run(
        ["setsid", "sh", "-c", "sbatch --output=log job.sh; kill -HUP -$$"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=10,
    )  # fmt: skip
    job_id = done.stdout.split()[-1]
    assert wait_for_job(Slurm(), job_id).state == "COMPLETED"
    assert "done" in read_log()


@pytest.mark.usefixtures("local_scheduler")
def test_several_submissions_at_once() -> None:
    Path("job.sh").write_text("#!/bin/sh\necho x >> done-$SLURM_JOB_ID\n")
    command = ["sbatch", "--parsable", "--output=/dev/null", "job.sh"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    ids = [process.communicate()[0].strip() for process in started]
    assert len(set(ids)) == 5
    for job_id in ids:
        assert wait_for_job(Slurm(), job_id).state == "COMPLETED"
        assert Path(f"done-{job_id}").read_text() == "x\n"


@pytest.mark.usefixtures("local_scheduler")
def test_the_enclosing_job_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "7")
    wait_for_job(Slurm(), submit("echo count ${SLURM_RESTART_COUNT:-none}"))
    assert read_log() == "count none\n"
