"""Whether a run goes on: after a stop (requeue or leave) and at a start (or has it been going in circles).

Pure decisions over the run directory's records. Sends nothing to the scheduler.
"""

from dataclasses import dataclass
from typing import Literal

from scaling_slurm.core.config import RequeueConfig
from scaling_slurm.core.trainer.preemption import StopCause
from scaling_slurm.errors import RefusedError
from scaling_slurm.run_directory import Attempt, RunDirectory, read_json

Cause = Literal["finished", "stop_file", "cancelled", "preempted", "time_limit"]
TICK_SECONDS = 90
"""Slurm looks at limits every 30 s and may warn up to a minute early."""


@dataclass(frozen=True)
class Decision:
    """What happens at the end of an attempt, and why."""

    cause: Cause
    requeue: bool
    reason: str = ""
    """Why a run that was interrupted is not requeued."""


def classify(stopped_by: StopCause, seconds_left: float | None, lead_seconds: int, is_ending: bool) -> Cause:
    """What a stop was about. The time left tells a time limit from a preemption: some sites signal both alike."""
    if stopped_by == StopCause.NONE:
        return "finished"
    if stopped_by == StopCause.STOP_FILE:
        return "stop_file"
    at_limit = seconds_left is not None and seconds_left < lead_seconds + TICK_SECONDS
    if is_ending and not at_limit:
        # Somebody else ends the job, and it is not the time: a cancelled job must not come back.
        return "cancelled"
    return "time_limit" if stopped_by == StopCause.DEADLINE or at_limit else "preempted"


def decide(cause: Cause, run: RunDirectory, attempt: Attempt, config: RequeueConfig, *, in_job: bool) -> Decision:
    """Whether rank 0 asks for a requeue now. Limits count over the whole run."""
    if cause in ("finished", "stop_file", "cancelled"):
        return Decision(cause, requeue=False)
    if not in_job:
        return Decision(cause, requeue=False, reason="not inside a job")
    if not config.enabled:
        return Decision(cause, requeue=False, reason="trainer.requeue.enabled is false")
    limit, setting = {
        "preempted": (config.max_preemptions, "max_preemptions"),
        "time_limit": (config.max_timeouts, "max_timeouts"),
    }[cause]
    ends = (read_json(other.end_file) for other in run.list_attempts() if other.number < attempt.number)
    before = sum(1 for end in ends if end is not None and end.get("cause") == cause)
    if before >= limit:
        reason = f"{cause} {before + 1} times; trainer.requeue.{setting} is {limit}"
        return Decision(cause, requeue=False, reason=reason)
    return Decision(cause, requeue=True)


def check_progress(run: RunDirectory, attempt: Attempt, config: RequeueConfig, job_id: str, step: int) -> None:
    """Raises RefusedError when requeues of this job lead nowhere; `scaling resume` starts a new job and a new count.

    Args:
        step: Of the newest checkpoint, 0 without one.
    """
    earlier = [other for other in run.list_attempts() if other.number < attempt.number]
    # An attempt that died before its first word is taken for one of this job: the job script had only just begun it.
    same_job = [other for other in earlier if (read_json(other.job_file) or {"job_id": job_id})["job_id"] == job_id]
    lost = [other for other in same_job if not other.end_file.exists()]
    if len(lost) > config.max_node_failures:
        raise RefusedError(
            f"{len(lost)} attempts of job {job_id} ended without a word, as after a lost node",
            "look at the logs, then `scaling resume`",
            "trainer.requeue.max_node_failures in the run file",
        )
    stuck = 0
    for other in reversed(same_job):
        if (read_json(other.end_file) or {}).get("cause") == "preempted":
            continue  # says nothing about this run; max_preemptions bounds these
        if (read_json(other.start_file) or {"step": step})["step"] < step:
            break
        stuck += 1
    if stuck >= config.max_without_progress:
        raise RefusedError(
            f"{stuck} attempts of job {job_id} in a row ended at step {step} without a new checkpoint",
            "the time limit must allow loading, one step and saving: see the logs, then `scaling resume`",
            "--time, or trainer.requeue.max_without_progress in the run file",
        )
