"""squeue, scontrol show and sacct as they are read by people, by submitit and by us."""

import re
import subprocess

import pytest
from submitit.slurm.slurm import SlurmInfoWatcher

from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.slurm.job_info import read_sacct
from tests.support.slurm import submit, wait_for_job


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_running_job(any_slurm: str) -> None:
    job_id = submit("sleep 30", "--nodes=2", "--time=3", "--job-name=my job", "--comment=a|b JobState=FAILED")
    info = wait_for_job(Slurm(), job_id, "RUNNING")
    assert (info.source, info.time_limit, len(info.nodes)) == ("squeue", 180.0, 2)
    assert info.start is not None
    assert info.end is not None
    if any_slurm == "real":
        assert info.end - info.start == 180
    assert ask("squeue", "-h", "-j", job_id, "-o", "%i %.5j|%t|%T|%D").split() == [job_id, "my", "jo|R|RUNNING|2"]
    titles = ask("squeue", "-j", job_id).splitlines()[0].split()
    assert titles == ["JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)"]
    shown = ask("scontrol", "show", "job", "-o", job_id)
    for words in (
        f"JobId={job_id} JobName=my job UserId=",
        " JobState=RUNNING ",
        " Restarts=0 ",
        " TimeLimit=00:03:00 ",
    ):
        assert words in shown
    Slurm().cancel(job_id)
    ended = wait_for_job(Slurm(), job_id)
    assert (ended.state, ended.source) == ("CANCELLED", "scontrol")
    assert ask("squeue", "-h") == ""


def test_unknown_job(any_slurm: str) -> None:
    for command in (["squeue", "-j", "999999"], ["scontrol", "show", "job", "999999"]):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "slurm_load_jobs error: Invalid job id specified\n")
    assert Slurm().job("999999") is None
    assert subprocess.run(["scancel", "999999"], check=False).returncode == 0


@pytest.mark.usefixtures("local_scheduler")
def test_accounts_of_finished_jobs() -> None:
    ids = [submit("exit 3"), submit("true")]
    for job_id in ids:
        wait_for_job(Slurm(), job_id)
    # submitit's own question and reader.
    watcher = SlurmInfoWatcher()
    watcher.register_job(ids[0])
    command = watcher._make_command()
    assert command is not None
    assert watcher.read_info(ask(*command))[ids[0]]["State"] == "FAILED"
    layout = "--format=JobID,JobIDRaw,State,ExitCode,Start,End,Timelimit,NodeList"
    found = read_sacct(ask("sacct", "-n", "-X", "--parsable2", f"--jobs={','.join(ids)}", layout))
    assert {job_id: (info.state, info.exit_code) for job_id, info in found.items()} == {
        ids[0]: ("FAILED", 3),
        ids[1]: ("COMPLETED", 0),
    }
    assert re.search(r"JobID +JobName +Partition", ask("sacct"))
