"""Which rank this process is and where the ranks meet, read from the environment that a launcher left.

Opens no socket and knows no torch; rank 0 binds the port, tries the next ones if it is taken, and publishes the result.
"""

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scaling_slurm.errors import ConfigError

FIRST_PORT, LAST_PORT = 20000, 32767
"""Below Linux's ephemeral ports, which begin at 32768, and above the registered services."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are not made by srun: the batch script, the external step, an interactive salloc shell."""
MODE_VARIABLE = "SCALING_RENDEZVOUS"
SUFFIX_VARIABLE = "SCALING_MASTER_SUFFIX"
TORCHRUN_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True)
class Rendezvous:
    """One process's place among the ranks. Alone: rank 0 of 1, no address, port 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str | None
    """Host that rank 0 is expected on; None when there is nobody to meet."""
    port: int
    """First port that rank 0 should try."""
    source: Literal["alone", "torchrun", "slurm"]
    host: str
    """Name of the node that this process runs on."""
    job_id: str | None
    """As Slurm's commands take it: 123, or 123_4 in an array. None outside of a Slurm step."""
    notes: tuple[str, ...] = ()
    """What the log should say about choices that were not ours, such as an exported MASTER_ADDR."""


def read_rendezvous(environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """The rendezvous of this process.

    torchrun is the inner launcher where both are present, so it goes first. Slurm counts only when our job script says
    so or inside of a step of several tasks: a batch shell and `srun --pty bash` look like rank 0 of many and are alone.
    Raises ConfigError where the launcher's variables are missing, malformed or contradict each other.
    """
    mode = environ.get(MODE_VARIABLE, "")
    if mode not in ("", "slurm"):
        raise ConfigError(f"{MODE_VARIABLE} is {mode!r}", "it must be 'slurm' or unset", "change the job script")
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _from_torchrun(environ)
    if mode == "slurm" or _in_parallel_step(environ):
        return _from_slurm(environ, planned=mode == "slurm")
    if all(environ.get(name) for name in TORCHRUN_VARIABLES):
        return _from_torchrun(environ)
    return Rendezvous(0, 1, 0, 1, 0, None, 0, "alone", socket.gethostname(), None)


def rendezvous_port(job_id: str, restart_count: int = 0) -> int:
    """A port in FIRST_PORT..LAST_PORT that all ranks of one start of a job agree on; the id holds the array task."""
    digest = hashlib.sha256(f"{job_id}/{restart_count}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % (LAST_PORT - FIRST_PORT + 1)


def expand_nodelist(text: str) -> list[str]:
    """Slurm's node list, one name an element: "a[01-02,7],b-c" -> a01 a02 a7 b-c. Raises ConfigError if malformed."""
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]]*\])+(?:,(?:[^\[\],\s]|\[[^\[\]]*\])+)*", text):
        raise ConfigError(f"the node list {text!r} cannot be read", "expected a form such as node[01-04,07],other-1")
    names: list[str] = []
    for group in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", group):
            endings = [literal] if literal else _expand_ranges(ranges, text)
            expanded = [name + ending for name in expanded for ending in endings]
        names += expanded
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"the node list {text!r} cannot be read at {part!r}", "expected a range such as 01-04")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's tasks of each node: "2(x3),1" -> 2 2 2 1. Raises ConfigError if malformed."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"the tasks per node {text!r} cannot be read", "expected a form such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def full_job_id(environ: Mapping[str, str]) -> str | None:
    """The id of this very job: of an array's task 123_4, so that requeueing it does not requeue the whole array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def _in_parallel_step(environ: Mapping[str, str]) -> bool:
    step, tasks = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NUM_TASKS", "")
    made_by_srun = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
    return made_by_srun and tasks.isdecimal() and int(tasks) > 1 and bool(environ.get("SLURM_PROCID"))


def _from_slurm(environ: Mapping[str, str], *, planned: bool) -> Rendezvous:
    step = _integer(environ, "SLURM_STEP_ID")
    if step >= FIRST_SPECIAL_STEP:
        raise ConfigError(
            f"SLURM_STEP_ID is {step}: this is a batch or interactive shell",
            "ranks must be started with srun",
            f"add srun before the command, or unset {MODE_VARIABLE} to run alone",
        )
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", minimum=1)
    rank = _integer(environ, "SLURM_PROCID", maximum=world_size - 1)
    hosts = expand_nodelist(_text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    tasks = expand_tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node_rank = _integer(environ, "SLURM_NODEID", maximum=len(hosts) - 1)
    _check_counts(environ, world_size, hosts, tasks, planned=planned)
    local_rank = _integer(environ, "SLURM_LOCALID", maximum=tasks[node_rank] - 1)
    job_id = full_job_id(environ)
    if job_id is None:
        raise ConfigError("SLURM_JOB_ID is not set", "every task of a Slurm step has it", "start the ranks with srun")

    notes: list[str] = []
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    first = hosts[0]
    if rank == 0 and environ.get("SLURMD_NODENAME") and host != first:
        notes.append(f"rank 0 runs on {host}, not on the first host of the list, {first}")
        first = host
    address = first + environ.get(SUFFIX_VARIABLE, "")
    if exported := environ.get("MASTER_ADDR"):
        if len(hosts) > 1 and _is_loopback(exported) and not _is_loopback(first):
            raise ConfigError(
                f"MASTER_ADDR is {exported!r} in a job of {len(hosts)} nodes",
                f"the other nodes cannot reach it; {address} would be right",
                "unset MASTER_ADDR in the environment or the job script",
            )
        notes.append(f"MASTER_ADDR={exported} was exported and is used instead of {address}")
        address = exported
    port = rendezvous_port(job_id, _integer(environ, "SLURM_RESTART_COUNT", default=0))
    if environ.get("MASTER_PORT"):
        exported_port = _integer(environ, "MASTER_PORT", minimum=1, maximum=65535)
        notes.append(f"MASTER_PORT={exported_port} was exported and is used instead of {port}")
        port = exported_port
    return Rendezvous(
        rank, world_size, local_rank, tasks[node_rank], node_rank, address, port, "slurm", host, job_id, tuple(notes)
    )


def _check_counts(
    environ: Mapping[str, str], world_size: int, hosts: list[str], tasks: list[int], *, planned: bool
) -> None:
    where = "make nodes x tasks per node and srun's options agree in the job script"
    if len(tasks) != len(hosts) or sum(tasks) != world_size:
        raise ConfigError(
            f"Slurm started {world_size} tasks on {len(hosts)} nodes"
            f" but lists {sum(tasks)} tasks on {len(tasks)} nodes",
            "the numbers must be equal",
            where,
        )
    per_node = _integer(environ, "SLURM_NTASKS_PER_NODE", minimum=1, default=0) if planned else 0
    if per_node and per_node * len(hosts) != world_size:
        raise ConfigError(
            f"the step has {world_size} tasks but {len(hosts)} nodes x {per_node} tasks per node"
            f" = {len(hosts) * per_node} were planned",
            "the numbers must be equal",
            where,
        )


def _from_torchrun(environ: Mapping[str, str]) -> Rendezvous:
    world_size = _integer(environ, "WORLD_SIZE", minimum=1)
    rank = _integer(environ, "RANK", maximum=world_size - 1)
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", minimum=1, maximum=world_size)
    local_rank = _integer(environ, "LOCAL_RANK", maximum=local_world_size - 1)
    node_rank = _integer(environ, "GROUP_RANK", default=rank // local_world_size)
    address = _text(environ, "MASTER_ADDR")
    port = _integer(environ, "MASTER_PORT", minimum=1, maximum=65535)
    if _in_parallel_step(environ):
        tasks = max(expand_tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")))
        if tasks > 1:
            raise ConfigError(
                f"srun started torchrun {tasks} times on a node",
                "torchrun starts the ranks of a node itself, so there must be 1 task per node",
                "use srun --ntasks-per-node=1, or start the ranks with srun and without torchrun",
            )
    return Rendezvous(
        rank, world_size, local_rank, local_world_size, node_rank, address, port, "torchrun", socket.gethostname(), None
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("localhost.")


def _text(environ: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set and not empty."""
    for name in names:
        if value := environ.get(name):
            return value
    raise ConfigError(f"{' and '.join(names)} not set", "the launcher sets it for every rank", "use srun or torchrun")


def _integer(
    environ: Mapping[str, str], name: str, minimum: int = 0, maximum: int | None = None, default: int | None = None
) -> int:
    """A variable as an integer within bounds; an empty one counts as not set."""
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text:
        raise ConfigError(f"{name} is not set", "the launcher sets it for every rank", "use srun or torchrun")
    if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigError(f"{name} is {text!r}", f"it must be an integer {allowed}", "check how the ranks are started")
    return int(text)
