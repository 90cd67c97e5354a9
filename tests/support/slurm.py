"""What tests of Slurm share: the clusters that they run against, and waiting for a job."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.job_info import JobInfo
from scaling_slurm.slurm.local_scheduler.jobs import list_jobs
from scaling_slurm.slurm.local_scheduler.processes import Process, is_alive, send_signal
from scaling_slurm.slurm.local_scheduler.programs import install_programs
from tests.support.slurm_lab import SlurmLab, missing_programs

T = TypeVar("T")
CHECKOUT = Path(__file__).resolve().parents[2]


def start_lab(directory: Path) -> Iterator[SlurmLab]:
    """The body of the fixture: a cluster of four nodes, or one that runs already ($SCALING_TEST_SLURM_DIRECTORY).

    Where Slurm is missing the test is skipped, unless $SCALING_TEST_SLURM=1 says that it has to be there.
    """
    if running := os.environ.get("SCALING_TEST_SLURM_DIRECTORY"):
        yield SlurmLab(Path(running))
        return
    required = os.environ.get("SCALING_TEST_SLURM") == "1"
    if missing := missing_programs():
        reason = f"no Slurm here: {', '.join(missing)} missing (Debian: slurmctld slurmd slurm-client munge iproute2)"
        pytest.fail(reason) if required else pytest.skip(reason)
    lab = SlurmLab(directory, die_with_us=True)
    try:
        lab.start()
    except RuntimeError as error:
        if required:
            raise
        pytest.skip(f"Slurm does not start here: {error}")
    try:
        yield lab
    finally:
        lab.stop()


def use_environment(patch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    """Replace the variables of this process until the test ends."""
    for name in set(os.environ) - set(environ):
        patch.delenv(name)
    for name, value in environ.items():
        patch.setenv(name, value)


def use_local_scheduler(patch: pytest.MonkeyPatch, state: Path, minute_seconds: float) -> Path:
    """A local scheduler of its own for one test, with fast minutes; returns the directory of its programs."""
    patch.setenv("SCALING_LOCAL_STATE", str(state))
    patch.setenv("SCALING_LOCAL_MINUTE_SECONDS", str(minute_seconds))
    programs = install_programs()
    patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


def end_local_jobs() -> None:
    """Whatever a test left running; its driver goes first and takes the rest with it."""
    left: list[Process] = []
    for job in list_jobs():
        if job.is_live:
            send_signal(job.driver.pid, signal.SIGKILL)
            left.append(job.driver)
    wait_until(lambda: not any(is_alive(driver) for driver in left), "drivers to end")
    list_jobs()


def wait_until(found: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Poll until the answer is true, and return it."""
    end = time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
    return answer


def wait_for_job(slurm: Slurm, job_id: str, *states: str, seconds: float = 30.0) -> JobInfo:
    """The job once it is in one of the states, by default in a final one."""
    last: list[JobInfo | None] = [None]

    def arrived() -> JobInfo | None:
        last[0] = slurm.job(job_id)
        if last[0] is None:
            return None
        return last[0] if (last[0].state in states if states else not last[0].is_live) else None

    try:
        found = wait_until(arrived, f"job {job_id} to be {' or '.join(states) or 'finished'}", seconds)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; it is {last[0]}") from None
    assert found is not None
    return found


def submit(body: str, *options: str) -> str:
    """Send a bash script whose output goes to the file `log` of the working directory; its job id."""
    Path("job.sh").write_text(f"#!/bin/bash\n{body}\n")
    command = ["sbatch", "--parsable", "--output=log", *options, "job.sh"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_log() -> str:
    """What the script has printed so far."""
    path = Path("log")
    return path.read_text() if path.exists() else ""


def run_job(body: str, *options: str) -> str:
    """Run a script to its end; what it printed."""
    wait_for_job(Slurm(), submit(body, *options))
    return read_log()


def lift_hold(slurm: Slurm, job_id: str) -> None:
    """Let a job start at once that real Slurm holds for some seconds after its requeue.

    Not before the daemons have reported the end of the first start: they would be taken to speak of the second one.
    """
    wait_for_job(slurm, job_id, "PENDING")
    time.sleep(1.0)
    subprocess.run(["scontrol", "update", f"job={job_id}", "StartTime=now"], check=True)
