"""Shows a run's log as it grows, over requeues, until its job has ended.

Asks the scheduler as seldom as the site wants.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from scaling_slurm.errors import JobFailedError, NotFoundError
from scaling_slurm.launch.failure import explain
from scaling_slurm.launch.runs import RunStatus, last_job, load_cluster_of, status_of
from scaling_slurm.run_directory import RunDirectory, read_json

READ_SECONDS = 0.3


def find_log(run: RunDirectory, attempt: int | None, rank: int) -> Path:
    """A rank's log of an attempt (by default the newest); raises NotFoundError and names what is there."""
    attempts = run.list_attempts()
    if not run.logs.is_dir():
        raise NotFoundError(
            f"{run.id} was trained without a job and has no logs", f"its numbers are in {run.metrics_file}"
        )
    if not attempts:
        job = last_job(run)
        state = status_of([run])[0].state if job else "not submitted"
        raise NotFoundError(f"{run.id} has not started yet: it is {state}", "`scaling logs -f` waits for it")
    number = attempt if attempt is not None else attempts[-1].number
    path = rank_log(run, number, rank)
    if path is None:
        there = ", ".join(sorted(log.name for log in run.logs.iterdir())) or "nothing"
        raise NotFoundError(f"{run.id} has no log of attempt {number}, rank {rank}", f"there is: {there}"[:500])
    return path


def rank_log(run: RunDirectory, attempt: int, rank: int) -> Path | None:
    """Where the rank writes: a file of its own, or above 64 ranks the one of its node (rank 0 is on node 0)."""
    candidates = [
        run.logs / f"attempt-{attempt:03d}-rank-{rank:05d}.log",
        *sorted(run.logs.glob(f"attempt-{attempt:03d}-node-*.log")),
    ]
    return next((path for path in candidates if path.exists()), None)


def follow(run: RunDirectory, rank: int) -> Iterator[str]:
    """Text of the rank's log as it comes, attempt after attempt, until the job ends.

    Raises JobFailedError if it failed.
    """
    pause = load_cluster_of(run).poll_seconds
    asked = 0.0
    first = _first_to_show(run)
    attempt, offset = 0, 0
    status: RunStatus | None = None
    while True:
        newest = max((other.number for other in run.list_attempts()), default=0)
        text, offset = _read_on(run, attempt, rank, offset)
        if text:
            yield text
        elif newest >= max(attempt + 1, first):
            attempt, offset = max(attempt + 1, first), 0
            if attempt > first:
                yield f"--- attempt {attempt}\n"
            continue
        elif status is not None and not status.is_live:
            break
        elif time.monotonic() - asked >= pause or _ended(run, attempt):
            status, asked = status_of([run])[0], time.monotonic()
            if not status.is_live:
                continue
        time.sleep(READ_SECONDS)
    raise_if_failed(run, status)


def _first_to_show(run: RunDirectory) -> int:
    """The newest attempt; or the next one, when that has ended and a job is to continue it."""
    attempts = run.list_attempts()
    if not attempts:
        return 1
    newest = attempts[-1]
    job = read_json(newest.job_file)
    is_over = newest.end_file.exists() or (job is not None and job["job_id"] != (last_job(run) or job)["job_id"])
    return newest.number + 1 if is_over and status_of([run])[0].is_live else newest.number


def raise_if_failed(run: RunDirectory, status: RunStatus) -> None:
    """Raises JobFailedError unless the run is finished or was stopped on request."""
    attempts = run.list_attempts()
    end = read_json(attempts[-1].end_file) if attempts else None
    if status.state == "FINISHED" or (end is not None and end["cause"] in ("stop_file", "cancelled")):
        return
    failure = explain(run, attempts[-1]) if attempts else None
    raise JobFailedError(
        f"{run.id} is {status.state}: {failure.headline if failure else status.reason or 'no reason is known'}",
        where=f"logs in {run.logs}; `scaling resume {run.id}` continues from the newest checkpoint",
    )


def _ended(run: RunDirectory, attempt: int) -> bool:
    """Whether the attempt itself says that it is over and will not be requeued; then asking at once is worth it."""
    end = read_json(run.attempt(attempt).end_file) if attempt else None
    return end is not None and not end["requeue"]


def _read_on(run: RunDirectory, attempt: int, rank: int, offset: int) -> tuple[str, int]:
    """Whole lines from `offset` on, and where they end; a torn line waits for its rest."""
    path = rank_log(run, attempt, rank) if attempt else None
    if path is None:
        return "", offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace"), offset + len(whole)
