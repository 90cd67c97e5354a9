"""What every rank of a job runs, from the job script to training, and how it leaves: requeued, finished or failed.

Torch is imported after the stop listener is in place, so that a signal that comes while libraries load is not lost.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
from scaling_slurm.core.trainer.preemption import StopListener
from scaling_slurm.errors import ConfigError, ExitCode, ScalingError, SchedulerRefusedError, SchedulerUnreachableError
from scaling_slurm.launch.requeue import Decision, check_progress, classify, decide
from scaling_slurm.launch.runs import slurm_of
from scaling_slurm.log import configure
from scaling_slurm.rendezvous import Rendezvous, read_rendezvous
from scaling_slurm.run_directory import Attempt, RunDirectory, record_end, record_failure, write_atomically
from scaling_slurm.settings import load_settings
from scaling_slurm.slurm.cluster import ClusterProfile
from scaling_slurm.slurm.commands import Slurm
from scaling_slurm.transformer.config import RunConfig

log = logging.getLogger(__name__)

CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "failed to recv",
    "timed out waiting",
)
"""What a rank says when another one is gone."""


def run_task(run_directory: str) -> NoReturn:
    """One rank of a submitted job, called by submitit. Its only argument is text, so nothing depends on a pickle."""
    rendezvous = read_rendezvous()
    configure(rendezvous.rank)
    run = RunDirectory.open(run_directory)
    attempt = run.attempt(int(os.environ["SCALING_ATTEMPT"]))
    signal.signal(signal.SIGCONT, signal.SIG_IGN)  # comes with each preemption; submitit would only log it
    with StopListener() as listener:
        try:
            config = load_settings(RunConfig, run.config_file).value
            code = _train_in_job(config, run, attempt, rendezvous, listener)
        except BaseException as error:
            _fail(error, attempt, rendezvous)
        # Before submitit's own handlers are back, whose SIGUSR2 would requeue whatever we decided.
        _leave(code)


def _train_in_job(
    config: RunConfig, run: RunDirectory, attempt: Attempt, rendezvous: Rendezvous, listener: StopListener
) -> int:
    for note in rendezvous.notes:
        log.info("%s", note)
    cluster = load_settings(ClusterProfile, run.cluster_file).value
    slurm, job_id = slurm_of(cluster), rendezvous.job_id or os.environ.get("SLURM_JOB_ID", "")
    leads = rendezvous.rank == 0
    deadline = None
    if leads:
        _begin(run, attempt, config, job_id)
        deadline = _deadline(slurm, job_id)

    from scaling_slurm.transformer.train import train

    refuse_missing_gpu(cluster)
    outcome = train(config, run, rendezvous, listener, attempt=attempt, deadline=deadline)
    if not leads:
        return ExitCode.OK
    cause = classify(
        outcome.stopped_by,
        None if deadline is None else deadline - time.time(),
        cluster.signal.lead_seconds,
        is_ending=outcome.stopped_by != 0 and _is_ending(slurm, job_id),
    )
    decision = decide(cause, run, attempt, config.trainer.requeue, in_job=bool(job_id) and cluster.requeue_allowed)
    record_end(run, attempt, decision.cause, outcome.step, requeue=decision.requeue, reason=decision.reason)
    return _exit_code(decision, attempt)


def refuse_missing_gpu(cluster: ClusterProfile) -> None:
    """Raises ConfigError where the site promises GPUs and this rank sees none: it would train on the CPU, unnoticed."""
    import torch

    if cluster.gpu.per_node and torch.cuda.device_count() == 0:
        raise ConfigError(
            f"nodes of {cluster.name} have {cluster.gpu.per_node} GPUs, but this rank sees none",
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}; PyTorch {torch.__version__} "
            "must fit the driver",
            "env, modules and setup in the cluster profile",
        )


def _begin(run: RunDirectory, attempt: Attempt, config: RunConfig, job_id: str) -> None:
    record = {
        "time": time.time(),
        "job_id": job_id,
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "host": socket.gethostname(),
        "nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
    }
    write_atomically(attempt.job_file, json.dumps(record))
    run.record_event("attempt", attempt=attempt.number, **record)
    previous = run.attempt(attempt.number - 1)
    if previous.job_file.exists() and not previous.end_file.exists():
        run.record_event("lost", attempt=previous.number)
    committed = CheckpointDirectory(run.checkpoints).committed()
    check_progress(run, attempt, config.trainer.requeue, job_id, committed[0].step if committed else 0)


def _deadline(slurm: Slurm, job_id: str) -> float | None:
    """Unix time of the time limit; None where nobody can tell, as in a container without Slurm's commands."""
    try:
        left = slurm.seconds_left(job_id)
    except (SchedulerRefusedError, SchedulerUnreachableError, OSError) as error:
        log.warning("the job's time limit is not known here: %s", error)
        return None
    return None if left is None else time.time() + left


def _is_ending(slurm: Slurm, job_id: str) -> bool:
    """Whether the job ends in any case: scancel sends the same SIGTERM as preemption, in whose grace it still runs."""
    try:
        info = slurm.job(job_id)
    except (SchedulerRefusedError, SchedulerUnreachableError, OSError):
        return False
    return info is not None and info.is_being_ended(time.time())


def _exit_code(decision: Decision, attempt: Attempt) -> int:
    """Of rank 0. The requeue itself is the job script's: scancel ends that shell, so that a cancelled job, which Slurm
    would requeue all the same, cannot come back, however late the cancellation comes."""
    if decision.requeue:
        # srun's exit code may hide ours when the other ranks are still there; and this rank may be killed any moment.
        attempt.requeue_file.touch()
        return ExitCode.REQUEUE
    interrupted = decision.cause in ("preempted", "time_limit")
    return ExitCode.JOB_FAILED if interrupted else ExitCode.OK


def _fail(error: BaseException, attempt: Attempt, rendezvous: Rendezvous) -> NoReturn:
    """Say why, once for people and once for `launch/failure.py`, and leave without waiting for anybody."""
    text = "".join(traceback.format_exception(error))
    words = f"{type(error).__name__}: {error}"
    is_consequence = any(phrase in words.lower() for phrase in CONSEQUENCES)
    if isinstance(error, ScalingError):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    trace = "" if isinstance(error, ScalingError) else text
    record_failure(attempt, rendezvous.rank, words, traceback=trace, is_consequence=is_consequence)
    if is_consequence:
        # Give the rank that failed first the time to be the one that srun reports.
        time.sleep(3)
    _leave(error.exit_code if isinstance(error, ScalingError) else ExitCode.UNEXPECTED)


def _leave(code: int) -> NoReturn:
    """Exit without destructors: a process group that lost a peer may wait for ever in its own."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
