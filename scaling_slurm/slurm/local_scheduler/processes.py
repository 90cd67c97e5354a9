"""Processes of this machine: who they are for ever, who descends from whom, how to signal and end them. Linux only."""

import contextlib
import os
import signal
import time
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Process(NamedTuple):
    """A process that no later one with the same number can be mistaken for."""

    pid: int
    start: int
    """Clock ticks since boot."""
    boot: str


def identify(pid: int) -> Process | None:
    """The living process with this number; a zombie is not living."""
    fields = _stat(pid)
    return Process(pid, int(fields[19]), boot_id()) if fields and fields[0] not in "ZX" else None


def is_alive(process: Process) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def boot_id() -> str:
    """Changes with every start of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(pid: int) -> list[int]:
    """All living children, their children and so on; the process itself is not among them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def send_signal(pid: int, number: int) -> None:
    """A signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_to_tree(process: Process, number: int) -> None:
    """A signal to a process and all its descendants, as Slurm signals a task's whole container."""
    if is_alive(process):
        for pid in (process.pid, *descendants(process.pid)):
            send_signal(pid, number)


def kill_descendants(pid: int, seconds: float = 10.0) -> None:
    """SIGKILL until nothing descends from the process any more, also what is started meanwhile."""
    end = time.monotonic() + seconds
    while (left := descendants(pid)) and time.monotonic() < end:
        for child in left:
            send_signal(child, signal.SIGKILL)
        time.sleep(0.01)


def kill_marked(markers: set[bytes]) -> None:
    """SIGKILL to all processes of this user whose first environment held all of these NAME=value."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if markers <= set(file.read().split(b"\0")):
                    send_signal(int(name), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, daemons included."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. For the time between fork and exec."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
