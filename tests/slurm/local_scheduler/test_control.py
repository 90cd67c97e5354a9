"""Requeueing, signals and cancelling, from outside and from inside of the job."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.local_scheduler.jobs import load_job, request
from tests.support.slurm import lift_hold, read_log, submit, wait_for_job, wait_until


def test_signal_reaches_the_tasks_and_their_children_but_not_the_script(any_slurm: str) -> None:
    child = "setsid bash -c 'trap \"echo child\" USR2; echo up; while :; do sleep 0.1; done'"
    Path("step.sh").write_text(f"trap 'echo task' USR2; {child} & while :; do sleep 0.1; done")
    job_id = submit("trap 'echo script' USR2\nsrun bash step.sh & wait; wait", "--nodes=2")
    wait_until(lambda: read_log().count("up") == 2, "the children")
    time.sleep(0.3)
    Slurm().cancel(job_id, "USR2")
    wait_until(lambda: read_log().count("task") == 2 and read_log().count("child") == 2, "signals")
    Slurm().cancel(job_id)
    assert wait_for_job(Slurm(), job_id).state == "CANCELLED"
    assert "script" not in read_log()


def test_requeue_from_inside_keeps_the_id(any_slurm: str) -> None:
    Path("step.sh").write_text("""trap 'echo got TERM; exit 0' TERM
[ $SLURM_PROCID = 1 ] || { sleep 1; scontrol requeue $SLURM_JOB_ID; }
while :; do sleep 0.1; done
""")
    body = """echo restart ${SLURM_RESTART_COUNT:-0}
if [ -z "$SLURM_RESTART_COUNT" ]; then
    srun bash step.sh
    sleep 60
fi"""
    job_id = submit(body, "--nodes=2", "--open-mode=append", "--requeue")
    wait_until(lambda: read_log().count("got TERM") == 2, "the tasks to be ended")
    if any_slurm == "real":
        lift_hold(Slurm(), job_id)
    wait_until(lambda: "restart 1" in read_log(), "the second start")
    info = wait_for_job(Slurm(), job_id)
    assert (info.state, info.restarts) == ("COMPLETED", 1)
    assert re.findall(r"restart \d", read_log()) == ["restart 0", "restart 1"]
    assert "DUE TO JOB REQUEUE ***" in read_log()


def test_script_that_requeues_as_its_last_act(any_slurm: str) -> None:
    body = """echo restart ${SLURM_RESTART_COUNT:-0}
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; exit 75; }"""
    job_id = submit(body, "--open-mode=append")
    if any_slurm == "real":
        wait_until(lambda: "Restarts=1" in subprocess.getoutput(f"scontrol show job {job_id}"), "the requeue")
        lift_hold(Slurm(), job_id)
    wait_until(lambda: "restart 1" in read_log(), "the second start")
    assert wait_for_job(Slurm(), job_id).state == "COMPLETED"


def test_hostnames(any_slurm: str) -> None:
    printed = subprocess.check_output(["scontrol", "show", "hostnames", "a[08-10],b-c"], text=True)
    assert printed.split() == ["a08", "a09", "a10", "b-c"]


@pytest.mark.parametrize("verb", ["scancel", "scontrol requeue"])
def test_a_job_can_see_whether_it_will_be_back(any_slurm: str, verb: str) -> None:
    body = '[ -n "$SLURM_RESTART_COUNT" ] || srun bash -c \'trap "" TERM; echo up; sleep 60; sleep 60\'; sleep 60'
    job_id = submit(body, "--time=10", "--requeue")
    wait_until(lambda: "up" in read_log(), "the task")
    subprocess.run([*verb.split(), job_id], check=True)
    ending = wait_for_job(Slurm(), job_id, "COMPLETING")
    assert ending.is_live
    assert ending.is_being_ended(time.time()) == (verb == "scancel")
    if verb == "scancel":
        assert wait_for_job(Slurm(), job_id).state == "CANCELLED"
    else:
        wait_for_job(Slurm(), job_id, "PENDING", "RUNNING")
        Slurm().cancel(job_id)
        wait_for_job(Slurm(), job_id)


@pytest.mark.usefixtures("local_scheduler")
def test_pending_job_can_be_cancelled() -> None:
    first = submit("sleep 30")
    waiting = submit("true", f"--dependency=afterany:{first}")
    # At once, while the driver's Python is still starting.
    job = load_job(int(waiting))
    assert job is not None
    request(job, "cancel")
    assert wait_for_job(Slurm(), waiting).state == "CANCELLED"


@pytest.mark.parametrize("target", ["--batch", "--full"])
def test_signal_to_the_script(any_slurm: str, target: str) -> None:
    body = "trap 'echo script' USR1\nsrun bash -c \"trap 'echo task' USR1; echo up; while :; do sleep 0.1; done\" &\n"
    job_id = submit(f"{body}while ! wait; do :; done\nsleep 9")
    wait_until(lambda: "up" in read_log(), "the task")
    subprocess.run(["scancel", target, "--signal=USR1", job_id], check=True)
    wait_until(lambda: "script" in read_log(), "the script's signal")
    time.sleep(0.3)
    assert ("task" in read_log()) == (target == "--full")
    Slurm().cancel(job_id)
    wait_for_job(Slurm(), job_id)


def test_no_requeue(any_slurm: str) -> None:
    job_id = submit("sleep 30", "--no-requeue")
    wait_for_job(Slurm(), job_id, "RUNNING")
    done = subprocess.run(["scontrol", "requeue", job_id], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"Requested operation is presently disabled for job {job_id}\n")
    Slurm().cancel(job_id)
    wait_for_job(Slurm(), job_id)
