"""The stand-in's jobs on disk: one directory each, written by the job's driver alone, read by everybody."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from scaling_slurm.slurm.local_scheduler.processes import Process, is_alive, kill_marked, send_signal

LIVE = ("PENDING", "RUNNING", "COMPLETING")
KILL_WAIT_SECONDS = 30.0
"""Slurm's KillWait: from SIGTERM to SIGKILL."""
JOB_MARKER, STATE_MARKER = "SLURM_JOB_ID", "SCALING_LOCAL_STATE"


def state_directory() -> str:
    """$SCALING_LOCAL_STATE, by default in the user's state directory."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.abspath(os.environ.get(STATE_MARKER) or os.path.join(home, "scaling", "local"))


def time_scale() -> float:
    """Seconds of a minute / 60: below 1 in tests, so that limits and grace periods pass faster."""
    return float(os.environ.get("SCALING_LOCAL_MINUTE_SECONDS", "60")) / 60


@dataclass
class Job:
    """One job. Times are seconds since 1970; `exit_status` is negative for the signal that ended the script."""

    id: int
    name: str
    nodes: int
    tasks_per_node: list[int]
    directory: str
    """Working directory."""
    options: dict[str, str]
    arguments: list[str]
    time_limit: float | None
    """Seconds as asked for, not scaled."""
    submitted: float
    driver: Process
    state: str = "PENDING"
    reason: str = "None"
    start: float | None = None
    end: float | None = None
    """Of a running job: its time limit."""
    restarts: int = 0
    exit_status: int = 0
    script: Process | None = None
    """The batch shell."""

    @property
    def path(self) -> str:
        return job_path(self.id)

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks_per_node)

    @property
    def node_names(self) -> list[str]:
        """Names that resolve everywhere on this machine, each to an address of its own."""
        return [f"127.0.0.{number + 1}" for number in range(self.nodes)]

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


@dataclass
class Step:
    """One srun of a job: its number and its tasks' processes."""

    number: int
    tasks: list[Process] = field(default_factory=list)


def job_path(job_id: int) -> str:
    """The directory of a job, whether it exists or not."""
    return os.path.join(state_directory(), "jobs", str(job_id))


def new_job_directory() -> int:
    """Make the directory of a new job; its number was never used before."""
    root = state_directory()
    os.makedirs(os.path.join(root, "jobs"), exist_ok=True)
    with locked():
        counter = os.path.join(root, "last_job_id")
        job_id = int(_read(counter) or "0") + 1
        replace_file(counter, str(job_id))
    os.makedirs(job_path(job_id))
    return job_id


@contextmanager
def locked() -> Iterator[None]:
    """Only one process at a time; the lock goes with its holder."""
    with open(os.path.join(state_directory(), "lock"), "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_file(path: str, text: str) -> None:
    """Readers see the old or the new text, never a part."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def save_job(job: Job) -> None:
    """Write the record of a job."""
    replace_file(os.path.join(job.path, "job.json"), json.dumps(asdict(job)))


def load_job(job_id: int) -> Job | None:
    """The job as it is now. One whose driver is gone, killed or lost in a reboot, becomes a failed node's."""
    job = read_job(job_id)
    if job is None or not job.is_live or is_alive(job.driver):
        return job
    # It may have ended in order between the two looks.
    job = read_job(job_id)
    if job is not None and job.is_live:
        job.state, job.reason, job.end, job.exit_status = "NODE_FAIL", "NodeDown", time.time(), 1
        save_job(job)
        kill_marked({f"{JOB_MARKER}={job_id}".encode(), f"{STATE_MARKER}={state_directory()}".encode()})
    return job


def read_job(job_id: int) -> Job | None:
    """The record as it is written."""
    text = _read(os.path.join(job_path(job_id), "job.json"))
    if text is None:
        return None
    record = json.loads(text)
    record["driver"] = Process(*record["driver"])
    record["script"] = Process(*record["script"]) if record["script"] else None
    return Job(**record)


def list_jobs() -> list[Job]:
    """All jobs, oldest first."""
    folder = os.path.join(state_directory(), "jobs")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = (load_job(job_id) for job_id in sorted(int(name) for name in names if name.isdigit()))
    return [job for job in found if job is not None]


def new_step(job: Job) -> Step:
    """Claim the next number of a step."""
    number = 0
    while True:
        try:
            os.makedirs(os.path.join(job.path, "steps", str(number)))
        except FileExistsError:
            number += 1
        else:
            return Step(number)


def save_step(job: Job, step: Step) -> None:
    """Write down the tasks of a step, so that they can be signalled."""
    replace_file(os.path.join(job.path, "steps", str(step.number), "tasks.json"), json.dumps(step.tasks))


def list_steps(job: Job) -> list[Step]:
    """The steps of a job's current start."""
    folder = os.path.join(job.path, "steps")
    steps = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        text = _read(os.path.join(folder, name, "tasks.json"))
        steps.append(Step(int(name), [Process(*task) for task in json.loads(text or "[]")]))
    return sorted(steps, key=lambda step: step.number)


def request(job: Job, wish: str) -> None:
    """Ask the driver of a live job to "cancel" or "requeue" it, and wake it up."""
    import signal

    with open(os.path.join(job.path, f"request-{wish}"), "w", encoding="ascii"):
        pass
    if is_alive(job.driver):
        send_signal(job.driver.pid, signal.SIGUSR1)


def take_request(job: Job) -> str | None:
    """The most important wish; all are forgotten."""
    wishes = [wish for wish in ("cancel", "requeue") if os.path.exists(os.path.join(job.path, f"request-{wish}"))]
    for wish in wishes:
        os.unlink(os.path.join(job.path, f"request-{wish}"))
    return wishes[0] if wishes else None


def fill_pattern(text: str, job: Job, *, step: int = 0, task: int = 0, node: int = 0) -> str:
    """A file name with Slurm's replacement symbols, such as %j, %x, %5t, filled in."""
    values: dict[str, int | str] = {
        "j": job.id, "A": job.id, "J": f"{job.id}.{step}", "s": step, "t": task, "n": node, "x": job.name,
        "N": job.node_names[node], "u": user_name(), "a": 4294967294,
    }  # fmt: skip

    def replace(match: re.Match[str]) -> str:
        if match[2] == "%":
            return "%"
        value = values[match[2]]
        return f"{value:0{int(match[1] or 0)}d}" if isinstance(value, int) else value

    return re.sub(r"%(\d*)([jAJstnxNua%])", replace, text)


def user_name() -> str:
    """Of the user that this process runs as."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def format_nodes(names: list[str]) -> str:
    """127.0.0.1 or 127.0.0.[1-4]."""
    if len(names) < 2:
        return "".join(names)
    prefix = names[0].rpartition(".")[0]
    return f"{prefix}.[{names[0].rpartition('.')[2]}-{names[-1].rpartition('.')[2]}]"


def format_tasks(counts: list[int]) -> str:
    """2 2 1 -> "2(x2),1"."""
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
