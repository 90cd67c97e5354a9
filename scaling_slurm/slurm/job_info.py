"""What Slurm knows about a job, read from the text of squeue, scontrol and sacct. Starts no process."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from scaling_slurm.rendezvous import expand_nodelist

FINISHED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"}
    | {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
)


@dataclass(frozen=True)
class JobInfo:
    """One job, as of the moment of asking."""

    job_id: str
    state: str
    """Slurm's word, such as RUNNING, without who cancelled it."""
    source: Literal["squeue", "scontrol", "sacct"]
    reason: str | None = None
    """Why it waits or ended, such as Resources."""
    nodes: tuple[str, ...] = ()
    restarts: int | None = None
    """How often it was requeued; None where the source does not say."""
    start: float | None = None
    """Seconds since 1970: of the start, or the expected one of a waiting job."""
    end: float | None = None
    """Of the end, or the time limit of a running job."""
    time_limit: float | None = None
    """Seconds; None if there is no limit."""
    exit_code: int | None = None
    """Of the job script, or 128 + the signal that ended it."""

    @property
    def is_live(self) -> bool:
        """Whether it may still run. A state that we do not know counts as live, so that nobody sends the job twice."""
        return self.state not in FINISHED

    def is_being_ended(self, now: float) -> bool:
        """Whether Slurm is ending it for good: cancelled, or at its limit.

        The state is COMPLETING then, as it is while a job is being requeued, but only here the end is not ahead.
        """
        return self.state == "COMPLETING" and self.end is not None and self.end <= now + 1


def read_squeue(text: str) -> dict[str, JobInfo]:
    """Lines of --format=%i|%A|%T|%r|%N|%S|%e|%l, by job id; an array's task is found under both of its ids."""
    found: dict[str, JobInfo] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 8:
            continue
        job_id, raw_id, state, reason, nodes, start, end, limit = (field.strip() for field in fields)
        info = JobInfo(
            job_id, read_state(state), "squeue", read_optional(reason), _read_nodes(nodes), None,
            read_time(start), read_time(end), read_duration(limit),
        )  # fmt: skip
        found[job_id] = info
        found.setdefault(raw_id, info)
    return found


def read_scontrol(text: str) -> dict[str, JobInfo]:
    """Lines of `scontrol show job --oneliner`, by job id."""
    found: dict[str, JobInfo] = {}
    for line in text.splitlines():
        head = re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\d+))?.*? UserId=", line)
        if head is None:
            continue
        # The first match after the job's name, which may hold anything; comments and commands come later in the line.
        rest = line[head.end() :]
        fields = dict(reversed(re.findall(r"(?<!\S)([\w/:]+)=(\S*)", rest)))
        job_id = f"{head[2]}_{head[3]}" if head[2] else head[1]
        info = JobInfo(
            job_id, read_state(fields.get("JobState", "")), "scontrol", read_optional(fields.get("Reason", "")),
            _read_nodes(fields.get("NodeList", "")), int(fields.get("Restarts", 0)), read_time(fields.get("StartTime")),
            read_time(fields.get("EndTime")), read_duration(fields.get("TimeLimit", "")),
            read_exit_code(fields.get("ExitCode", "")),
        )  # fmt: skip
        found[job_id] = info
        found.setdefault(head[1], info)
    return found


def read_sacct(text: str) -> dict[str, JobInfo]:
    """Lines of --parsable2 --format=JobID,JobIDRaw,State,ExitCode,Start,End,Timelimit,NodeList, by job id."""
    found: dict[str, JobInfo] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        # 12.batch, 12.extern and 12.0 are steps.
        if len(fields) != 8 or "." in fields[0]:
            continue
        job_id, raw_id, state, exit_code, start, end, limit, nodes = fields
        info = JobInfo(
            job_id, read_state(state), "sacct", None, _read_nodes(nodes), None, read_time(start), read_time(end),
            read_duration(limit), read_exit_code(exit_code),
        )  # fmt: skip
        found[job_id] = info
        found.setdefault(raw_id, info)
    return found


def read_state(text: str) -> str:
    """CANCELLED by 123 and CANCELLED+ -> CANCELLED; nothing -> UNKNOWN."""
    words = text.split()
    return words[0].rstrip("+") if words else "UNKNOWN"


def read_optional(text: str) -> str | None:
    """Slurm's several words for nothing -> None."""
    return None if text in ("", "None", "(null)", "N/A", "None assigned", "Unknown") else text


def _read_nodes(text: str) -> tuple[str, ...]:
    return tuple(expand_nodelist(text)) if read_optional(text) else ()


def read_time(text: str | None) -> float | None:
    """Local time in ISO form -> seconds since 1970; N/A, Unknown -> None."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def read_duration(text: str) -> float | None:
    """1-02:03:04, 02:03:04 or 03:04 (minutes and seconds) -> seconds; UNLIMITED, INVALID, Partition_Limit -> None."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_exit_code(text: str) -> int | None:
    """3:0 -> 3; 0:9 -> 137."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    return 128 + int(match[2]) if int(match[2]) else int(match[1])
