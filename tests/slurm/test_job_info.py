"""What Slurm's programs print about a job: text that real ones printed, and the traps in it."""

from datetime import datetime

import pytest

from scaling_slurm.slurm.job_info import (
    JobInfo,
    read_duration,
    read_exit_code,
    read_sacct,
    read_scontrol,
    read_squeue,
    read_state,
)

SHOWN = (
    "JobId=1024 JobName=my JobState=X UserId=job UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=42949017 Nice=0"
    " Account=(null) QOS=(null) JobState=NODE_FAIL Reason=NodeDown Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1"
    " Reboot=0 ExitCode=0:9 RunTime=00:00:00 TimeLimit=1-00:10:00 TimeMin=N/A SubmitTime=2026-12-01T13:48:34"
    " StartTime=2026-12-01T13:48:34 EndTime=Unknown Deadline=N/A Partition=normal ReqNodeList=node[08-09]"
    " ExcNodeList=(null) NodeList=node[01-02] BatchHost=node01 NumNodes=2-2 Command=(null) WorkDir=/tmp"
    " Comment=JobState=FAILED Restarts=7  StdErr=/dev/null Power= \n"
)


def test_squeue() -> None:
    text = (
        "1003|1003|RUNNING|None|node[01-02]|2026-12-01T13:45:54|2026-12-01T13:50:54|5:00\n"
        "1018_2|1018|PENDING|Dependency||N/A|N/A|UNLIMITED\n"
        "1018_0|1019|CANCELLED|None||N/A|N/A|5:00\n"
    )
    found = read_squeue(text)
    start = datetime(2026, 12, 1, 13, 45, 54).timestamp()
    assert found["1003"] == JobInfo(
        "1003", "RUNNING", "squeue", None, ("node01", "node02"), None, start, start + 300, 300.0, None
    )
    assert (found["1018_2"].reason, found["1018_2"].nodes, found["1018_2"].time_limit) == ("Dependency", (), None)
    assert found["1019"].job_id == "1018_0"
    assert [info.is_live for info in (found["1003"], found["1018_2"], found["1018_0"])] == [True, True, False]


def test_scontrol_with_a_name_and_a_comment_that_look_like_fields() -> None:
    info = read_scontrol(SHOWN)["1024"]
    assert (info.state, info.reason, info.restarts, info.exit_code) == ("NODE_FAIL", "NodeDown", 2, 137)
    assert (info.nodes, info.time_limit, info.end) == (("node01", "node02"), 87000.0, None)


def test_scontrol_of_an_array_task() -> None:
    found = read_scontrol(SHOWN.replace("JobId=1024", "JobId=1024 ArrayJobId=1020 ArrayTaskId=3"))
    assert found["1020_3"] == found["1024"]


def test_sacct_leaves_steps_out() -> None:
    text = (
        "12|12|CANCELLED by 1000|0:15|2026-12-01T13:45:54|Unknown|05:00:00|node[1-2]\n"
        "12.batch|12.batch|FAILED|1:0|2026-12-01T13:45:54|Unknown||node1\n"
        "13_4|17|COMPLETED|0:0|Unknown|Unknown|Partition_Limit|None assigned\n"
    )
    found = read_sacct(text)
    assert set(found) == {"12", "13_4", "17"}
    assert (found["12"].state, found["12"].exit_code, found["12"].nodes) == ("CANCELLED", 143, ("node1", "node2"))
    assert (found["17"].time_limit, found["17"].nodes) == (None, ())


@pytest.mark.parametrize(
    ("text", "state"),
    [("CANCELLED by 123", "CANCELLED"), ("CANCELLED+", "CANCELLED"), ("TIMEOUT", "TIMEOUT"), ("", "UNKNOWN")],
)
def test_state(text: str, state: str) -> None:
    assert read_state(text) == state


def test_an_unknown_state_counts_as_live() -> None:
    assert JobInfo("1", "UNKNOWN", "sacct").is_live
    assert JobInfo("1", "RESV_DEL_HOLD", "squeue").is_live


def test_whether_a_job_is_being_ended() -> None:
    ending = JobInfo("1", "COMPLETING", "squeue", end=100.0)
    assert ending.is_being_ended(99.5)
    assert not ending.is_being_ended(50.0)
    assert not JobInfo("1", "RUNNING", "squeue", end=100.0).is_being_ended(100.0)
    assert not JobInfo("1", "COMPLETING", "squeue").is_being_ended(100.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("0:07", 7), ("09:00:00", 32400), ("1-02:03:04", 93784), ("UNLIMITED", None), ("INVALID", None)],
)
def test_duration(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


def test_exit_code() -> None:
    assert [read_exit_code(text) for text in ("0:0", "75:0", "0:9", "")] == [0, 75, 137, None]
