"""The run directory: every path of a run, and the small records in it. Knows no scheduler, no torch, no model.

It is the one truth about a run and may be moved as a whole. Files are replaced atomically or only appended to.
"""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_slurm.errors import NotFoundError, RefusedError

log = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash at any moment, sees the old or the new text, never a part."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(path: Path) -> Path:
    """Where this process writes what will be renamed to `path`; no other process has the same name."""
    return path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write; concurrent writers do not mix, and a torn line spoils only itself."""
    line = json.dumps(record, default=str) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # Read while another process writes, a whole line may look torn: then an empty one follows, which is skipped.
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * is_torn + line).encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file that may still be written to; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


@dataclass(frozen=True)
class Attempt:
    """One start of the run: the first one, after a requeue, or by `scaling resume`. Numbered from 1."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def job_file(self) -> Path:
        """Written by rank 0 before anything else: job id, restart count, host."""
        return self.path / "job.json"

    @property
    def start_file(self) -> Path:
        """Written by rank 0 once a checkpoint is loaded: the steps that are done."""
        return self.path / "start.json"

    @property
    def end_file(self) -> Path:
        """Written by rank 0 as the attempt ends in order: cause, last step, whether it was requeued."""
        return self.path / "end.json"

    @property
    def requeue_file(self) -> Path:
        """Written by rank 0 before it asks for a requeue: if it cannot, the job script does."""
        return self.path / "requeue"

    @property
    def notice_file(self) -> Path:
        """Written by a rank that gets a signal, for ranks that wait for data."""
        return self.path / "stop-requested"

    @property
    def rendezvous_file(self) -> Path:
        """Where rank 0 publishes the address that it listens on."""
        return self.path / "rendezvous.json"

    def failure_file(self, rank: int) -> Path:
        """A rank's last words: time, host, traceback."""
        return self.path / f"failure-rank-{rank:05d}.json"

    def failures(self) -> list[dict[str, Any]]:
        """All ranks' last words, earliest first."""
        records = (read_json(path) for path in self.path.glob("failure-rank-*.json"))
        return sorted((record for record in records if record is not None), key=lambda record: float(record["time"]))


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON record, or None where there is none (or only a torn one, on a file system without atomic rename)."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class RunDirectory:
    """Names every file of a run; creates none of them unless asked to."""

    path: Path

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """An existing run directory; raises NotFoundError when it holds no resolved config."""
        run = cls(Path(path).resolve())
        if not run.config_file.is_file():
            raise NotFoundError(f"{path} is not a run directory: it has no config.yaml")
        return run

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def cluster_file(self) -> Path:
        return self.path / "cluster.yaml"

    @property
    def script_file(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def code_file(self) -> Path:
        """Commit, branch and list of untracked files of the code that ran."""
        return self.path / "code.json"

    @property
    def code_patch(self) -> Path:
        """Uncommitted changes of tracked files."""
        return self.path / "code.patch"

    @property
    def jobs_file(self) -> Path:
        """One line for each job that was sent for this run."""
        return self.path / "jobs.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def finished_file(self) -> Path:
        """Exists once the last step is in a checkpoint."""
        return self.path / "finished.json"

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to save and leave, and not to be requeued."""
        return self.path / "STOP"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / "submitit"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.attempts / f"{number:03d}")

    def list_attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        if not self.attempts.is_dir():
            return []
        numbers = (int(entry.name) for entry in self.attempts.iterdir() if re.fullmatch(r"\d{3,}", entry.name))
        return [self.attempt(number) for number in sorted(numbers)]

    def claim_attempt(self) -> Attempt:
        """Start a new attempt: the highest number counts, and everything older has lost the right to write."""
        self.attempts.mkdir(parents=True, exist_ok=True)
        number = max((attempt.number for attempt in self.list_attempts()), default=0) + 1
        while True:
            attempt = self.attempt(number)
            try:
                attempt.path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return attempt

    def is_current(self, number: int) -> bool:
        """Whether no newer attempt has started."""
        return not self.attempt(number + 1).path.exists()

    def record_event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl; never raises, so that a full disk does not end a run through its diary."""
        with suppress(OSError):
            append_line(self.events_file, {"time": time.time(), "event": kind} | fields)


@contextmanager
def exclusive(run: RunDirectory, verb: str) -> Iterator[None]:
    """One process at a time may `verb` a run; raises RefusedError for the second. A dead one's lock is free."""
    descriptor = os.open(run.path / f".{verb}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RefusedError(f"another process is at work to {verb} {run.id}", "wait for its end") from None
    except OSError:
        # Some parallel file systems have no locks. There, the numbers of attempts still fence off a second writer.
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def record_end(
    run: RunDirectory, attempt: Attempt, cause: str, step: int, *, requeue: bool = False, reason: str = ""
) -> None:
    """Write how an attempt ended in order, for people, for the next attempt and for `scaling status`.

    Args:
        cause: finished, stop_file, cancelled, preempted or time_limit.
        step: Of the newest checkpoint.
        requeue: Whether it continues by itself.
        reason: Why not, where an interrupted run does not.
    """
    record = {"time": time.time(), "cause": cause, "step": step, "requeue": requeue, "reason": reason}
    write_atomically(attempt.end_file, json.dumps(record))
    run.record_event("end", attempt=attempt.number, **record)
    if cause == "finished":
        write_atomically(run.finished_file, json.dumps({"time": time.time(), "step": step}))
    what = "finished" if cause == "finished" else f"stopped ({cause})"
    log.info("%s after step %d%s", what, step, reason and f": {reason}")


def record_failure(
    attempt: Attempt, rank: int, error: str, *, traceback: str = "", is_consequence: bool = False
) -> None:
    """Write a rank's last words; a full disk takes them away, and raises nothing.

    Args:
        is_consequence: Another rank failed first, and this one only lost it.
    """
    record = {
        "time": time.time(),
        "rank": rank,
        "host": os.uname().nodename,
        "error": error,
        "consequence": is_consequence,
        "traceback": traceback,
    }
    try:
        write_atomically(attempt.failure_file(rank), json.dumps(record))
    except OSError as problem:
        log.error("cannot write %s: %s", attempt.failure_file(rank), problem.strerror)
