"""Why an attempt failed, in one line that names host, rank and signal or exception, with the first traceback.

Reads the ranks' last words and srun's own lines in the job log. Run by the job script after srun has failed.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from scaling_slurm.run_directory import Attempt, RunDirectory, read_json, read_lines

SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Out Of Memory": "the out-of-memory killer",
}
NO_WORD = "srun failed, but no rank left a word"
_TASK = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): (?P<what>[^(\n]+)")


@dataclass(frozen=True)
class Failure:
    """Root causes first, each one line; then the traceback of the first one, and what followed from it."""

    causes: tuple[str, ...]
    traceback: str
    consequences: int

    @property
    def headline(self) -> str:
        return self.causes[0] if self.causes else "no rank left a cause: see the log files"

    def describe(self) -> str:
        lines = list(self.causes) or [self.headline]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.consequences:
            lines.append(f"{self.consequences} other rank(s) lost their connection as a consequence")
        return "\n".join(lines)


def explain(run: RunDirectory, attempt: Attempt) -> Failure | None:
    """What is known of an attempt's failure, at least that its job script saw it; None when nothing points to one."""
    causes, traceback, consequences = [], "", 0
    told = set()
    for record in attempt.failures():
        told.add(record["rank"])
        if record["consequence"]:
            consequences += 1
            continue
        causes.append(f"rank {record['rank']} on {record['host']} failed: {record['error']}")
        traceback = traceback or record["traceback"]
    job = read_json(attempt.job_file)
    killed = []
    if job is not None:
        for rank, host, signal in _killed_tasks(run.logs / f"job-{job['job_id']}.log", attempt.number):
            if rank not in told:
                killed.append(f"rank {rank} on {host} was killed by {signal}")
    # srun ends the others with SIGTERM once one has failed, so a SIGTERM alone is no cause.
    killed = [line for line in killed if not line.endswith("SIGTERM")] or ([] if causes or consequences else killed)
    if not (causes or killed or consequences):
        events = (event for event in read_lines(run.events_file) if event.get("event") == "failed")
        causes = [str(event["cause"]) for event in events if event.get("attempt") == attempt.number][-1:]
        if not causes:
            return None
    return Failure(tuple(causes + killed), traceback, consequences)


def _killed_tasks(log: Path, attempt: int) -> list[tuple[int, str, str]]:
    """(rank, host, signal) as srun told, for the part of the job log that belongs to this attempt."""
    if not log.exists():
        return []
    text = log.read_text(errors="replace")
    begin = re.search(rf"^attempt {attempt} of ", text, re.MULTILINE)
    end = re.search(rf"^attempt {attempt + 1} of ", text, re.MULTILINE)
    found = []
    for match in _TASK.finditer(text, begin.end() if begin else 0, end.start() if end else len(text)):
        signal = SIGNALS.get(match["what"].strip())
        if signal is not None:
            found += [(rank, match["host"], signal) for rank in _expand(match["ranks"])]
    return found


def _expand(ranks: str) -> list[int]:
    """ "1,3-5" -> 1 3 4 5."""
    expanded: list[int] = []
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        expanded += range(int(first), int(last or first) + 1)
    return expanded


def main(run_directory: str, attempt: str) -> None:
    """Print the explanation to stderr, for the job log."""
    run = RunDirectory(Path(run_directory))
    if end := read_json(run.attempt(int(attempt)).end_file):
        print(f"stopped ({end['cause']}) after step {end['step']}: {end['reason'] or 'on request'}", file=sys.stderr)
        return
    failure = explain(run, run.attempt(int(attempt)))
    if failure is None and os.statvfs(run.path).f_bavail == 0:
        failure = Failure((f"the file system of {run.path} is full",), "", 0)
    print(f"error: {failure.describe() if failure else NO_WORD}", file=sys.stderr)
    run.record_event("failed", attempt=int(attempt), cause=failure.headline if failure else NO_WORD)


if __name__ == "__main__":
    main(*sys.argv[1:])
