"""Daemons: recorded by number and start time, and signalled only if they are still the same processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from scaling_slurm.slurm.local_scheduler.processes import die_with_parent


def start_ticks(pid: int) -> int | None:
    """With the number it names one process for ever. None: gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Daemons:
    """The daemons of one directory: its pids/ and log/."""

    def __init__(self, directory: Path, *, die_with_us: bool) -> None:
        self.directory, self.die_with_us = directory, die_with_us
        self.children: list[subprocess.Popen[bytes]] = []

    def pid(self, name: str) -> int | None:
        """The number of a daemon that we started and that still runs."""
        try:
            pid, ticks = json.loads((self.directory / "pids" / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        return int(pid) if ticks is not None and start_ticks(pid) == ticks else None

    def start(self, name: str, command: list[str], environ: Mapping[str, str]) -> None:
        """Start a daemon unless it runs."""
        if self.pid(name):
            return
        program = shutil.which(command[0], path=environ["PATH"]) or command[0]
        with open(self.directory / "log" / f"{name}.out", "ab") as log:
            process = subprocess.Popen(
                [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
                start_new_session=True, env=dict(environ), preexec_fn=die_with_parent if self.die_with_us else None,
            )  # fmt: skip
        self.children.append(process)
        (self.directory / "pids" / f"{name}.json").write_text(json.dumps([process.pid, start_ticks(process.pid)]))

    def kill(self, name: str, number: int = signal.SIGTERM) -> None:
        """Signal a daemon and wait until it has ended, by SIGKILL if it must be."""
        for attempt in (number, signal.SIGKILL):
            pid = self.pid(name)
            if pid is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, attempt)
            end = time.monotonic() + 5
            while self.pid(name) and time.monotonic() < end:
                time.sleep(0.02)
        for process in self.children:
            process.poll()
        (self.directory / "pids" / f"{name}.json").unlink(missing_ok=True)

    def wait(self, ready: Callable[[], object], what: str, names: Iterable[str] = (), seconds: float = 60) -> None:
        """Until something is ready; fails early with the logs if one of the named daemons ends."""
        end = time.monotonic() + seconds
        problem: object = "not ready"
        while time.monotonic() < end:
            try:
                if ready():
                    return
            except (RuntimeError, subprocess.SubprocessError) as error:
                problem = error
            if dead := [name for name in names if self.pid(name) is None]:
                logs = [path for name in dead for path in (self.directory / "log").glob(f"{name}*")]
                raise RuntimeError(f"{dead} ended: " + "".join(path.read_text()[-2000:] for path in logs))
            time.sleep(0.05)
        raise RuntimeError(f"waited {seconds:g} s for {what}: {problem}")
