"""The driver of one job: runs its script in the place of slurmctld and slurmd, with limit, warning, requeue and end.

One process for each job, from submission to the end. It alone writes the job's record.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time

from scaling_slurm.slurm.local_scheduler import jobs
from scaling_slurm.slurm.local_scheduler.jobs import Job
from scaling_slurm.slurm.local_scheduler.options import LimitWarning, parse_warning
from scaling_slurm.slurm.local_scheduler.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    identify,
    kill_descendants,
    send_signal,
    send_to_tree,
)

REQUEUE_HOLD_SECONDS = 1.0
IDLE_SECONDS = 30.0
"""Longest sleep: everything that matters wakes the driver up."""
ENDINGS = {"timeout": "TIMEOUT", "cancel": "CANCELLED", "requeue": "PENDING"}
CAUSES = {"timeout": " DUE TO TIME LIMIT", "cancel": "", "requeue": " DUE TO JOB REQUEUE"}


def drive(job_id: int) -> int:
    """Run the job until it ends for good."""
    job = _wait_for_record(job_id)
    if job is None:
        return 1
    adopt_orphans()
    wake_up = _listen()
    while job.is_live:
        if _wait_for_turn(job, wake_up):
            ending = _run(job, wake_up)
            if ending == "requeue":
                jobs.save_job(job)
                time.sleep(REQUEUE_HOLD_SECONDS * jobs.time_scale())
    return 0


def _wait_for_record(job_id: int) -> Job | None:
    """sbatch writes it right after it started us."""
    for _ in range(500):
        if job := jobs.read_job(job_id):
            return job
        time.sleep(0.02)
    return None


def _listen() -> int:
    """A descriptor that can be read from when SIGUSR1 says that there is a request."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # Not SIG_IGN, which the script and all tasks would inherit.
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return reading


def _wait_for_turn(job: Job, wake_up: int) -> bool:
    """Until dependencies have ended and the machine has a free place. False if the job was cancelled meanwhile."""
    places = int(os.environ.get("SCALING_LOCAL_JOBS", "0"))
    waited_for = [int(word) for word in re.findall(r"(?<=:)\d+", job.options.get("dependency", ""))]
    while True:
        wish = jobs.take_request(job)
        if wish == "cancel":
            _finish(job, "CANCELLED", 0)
            return False
        reason = "None"
        if any((other := jobs.load_job(number)) is not None and other.is_live for number in waited_for):
            reason = "Dependency"
        else:
            with jobs.locked():
                running = sum(other.state != "PENDING" for other in jobs.list_jobs() if other.is_live) if places else 0
                if not places or running < places:
                    job.state, job.reason, job.start = "RUNNING", "None", time.time()
                    job.end = None if job.time_limit is None else job.start + job.time_limit * jobs.time_scale()
                    jobs.save_job(job)
                    return True
            reason = "Resources"
        if reason != job.reason:
            job.reason = reason
            jobs.save_job(job)
        select.select([wake_up], [], [], 0.3)
        _drain(wake_up)


def _drain(wake_up: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(wake_up, 512):
            pass


def _run(job: Job, wake_up: int) -> str | None:
    """One start of the job. Returns why it was ended, if it did not end by itself; the record is final then."""
    shutil.rmtree(os.path.join(job.path, "steps"), ignore_errors=True)
    try:
        script, error_file = _start_script(job)
    except OSError as error:
        print(f"could not start the script: {error}", flush=True)
        _finish(job, "FAILED", 1, "RaisedSignal:53(Real-time_signal_19)")
        return None
    job.script = identify(script.pid)
    jobs.save_job(job)
    ending = _watch(job, script, wake_up)
    if ending:
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        with os.fdopen(os.dup(error_file), "w") as file:
            node = job.node_names[0]
            file.write(f"slurmstepd: error: *** JOB {job.id} ON {node} CANCELLED AT {now}{CAUSES[ending]} ***\n")
        job.state = "COMPLETING"
        # As with Slurm, this is how a job can see whether it will be back.
        if ending == "requeue":
            job.restarts += 1
        else:
            job.end = time.time()
        jobs.save_job(job)
        _stop(script)
    kill_descendants(os.getpid())
    status = script.wait()
    os.close(error_file)
    # A script may ask for its requeue as the last thing it does.
    if ending is None and (ending := jobs.take_request(job)) == "requeue":
        job.restarts += 1
    if ending == "requeue":
        job.state, job.reason, job.start, job.end, job.script = "PENDING", "BeginTime", None, None, None
        return ending
    if ending:
        _finish(
            job, ENDINGS[ending], status if ending == "cancel" else 0, "TimeLimit" if ending == "timeout" else "None"
        )
    else:
        _finish(job, "FAILED" if status else "COMPLETED", status, "NonZeroExitCode" if status else "None")
    return None


def _finish(job: Job, state: str, status: int, reason: str = "None") -> None:
    job.state, job.reason, job.exit_status, job.end = state, reason, status, time.time()
    job.start = job.start or job.end
    job.script = None
    jobs.save_job(job)


def _watch(job: Job, script: "subprocess.Popen[bytes]", wake_up: int) -> str | None:
    """Wait for the end of the script, or for a reason to end it; warns once before the limit."""
    warning = parse_warning(job.options["signal"]) if "signal" in job.options else None
    poll = select.poll()
    ended = os.pidfd_open(script.pid)
    poll.register(ended, select.POLLIN)
    poll.register(wake_up, select.POLLIN)
    try:
        while script.poll() is None:
            if wish := jobs.take_request(job):
                return wish
            now, timeout = time.time(), IDLE_SECONDS
            if job.end is not None:
                if now >= job.end:
                    return "timeout"
                timeout = min(timeout, job.end - now)
                if warning:
                    at = job.end - warning.seconds * jobs.time_scale()
                    if now >= at:
                        _warn(job, warning)
                        warning = None
                    else:
                        timeout = min(timeout, at - now)
            poll.poll(timeout * 1000 + 1)
            _drain(wake_up)
    finally:
        os.close(ended)
    return None


def _warn(job: Job, warning: LimitWarning) -> None:
    if warning.batch_only and job.script:
        send_signal(job.script.pid, warning.number)
    for step in [] if warning.batch_only else jobs.list_steps(job):
        for task in step.tasks:
            send_to_tree(task, warning.number)


def _stop(script: "subprocess.Popen[bytes]") -> None:
    """SIGCONT and SIGTERM to everything of the job, and time to end."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        for pid in descendants(os.getpid()):
            send_signal(pid, number)
    end = time.monotonic() + jobs.KILL_WAIT_SECONDS * jobs.time_scale()
    while time.monotonic() < end and descendants(os.getpid()):
        script.poll()
        time.sleep(0.02 if end - time.monotonic() > 1 else 0.01)


def _start_script(job: Job) -> tuple["subprocess.Popen[bytes]", int]:
    """Start the batch shell; the descriptor is where messages about the job go."""
    append = job.options.get("open-mode") == "append"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if append else os.O_TRUNC)
    output = jobs.fill_pattern(job.options.get("output", "slurm-%j.out"), job)
    out = os.open(os.path.join(job.directory, output), flags, 0o644)
    error = job.options.get("error")
    err = os.open(os.path.join(job.directory, jobs.fill_pattern(error, job)), flags, 0o644) if error else os.dup(out)
    path = os.path.join(job.path, "script")
    with open(path, encoding="utf-8") as file:
        # The file system of the state may forbid execution.
        interpreter = file.readline().rstrip("\n").removeprefix("#!").split(None, 1)
    try:
        process = subprocess.Popen(
            [*interpreter, path, *job.arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=job.directory,
            env=_environment(job), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    finally:
        os.close(out)
    return process, err


def _environment(job: Job) -> dict[str, str]:
    """What a batch script finds: that of sbatch, and Slurm's variables of the job. None of a step."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    nodes = jobs.format_nodes(job.node_names)
    tasks = jobs.format_tasks(job.tasks_per_node)
    environ |= {
        "SLURM_JOB_ID": str(job.id), "SLURM_JOBID": str(job.id), "SLURM_JOB_NAME": job.name,
        "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(job.nodes),
        "SLURM_NNODES": str(job.nodes), "SLURM_NTASKS": str(job.num_tasks), "SLURM_NPROCS": str(job.num_tasks),
        "SLURM_TASKS_PER_NODE": tasks, "SLURM_JOB_PARTITION": job.options.get("partition", "local"),
        "SLURM_CLUSTER_NAME": "local", "SLURM_SUBMIT_DIR": job.directory, "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": job.node_names[0],
        "SLURM_JOB_USER": jobs.user_name(), "SLURM_JOB_UID": str(os.getuid()), "SLURM_TASK_PID": "0",
    }  # fmt: skip
    for option, variable in (
        ("ntasks-per-node", "SLURM_NTASKS_PER_NODE"),
        ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
        ("account", "SLURM_JOB_ACCOUNT"),
        ("gpus-per-node", "SLURM_GPUS_PER_NODE"),
    ):
        if option in job.options:
            environ[variable] = job.options[option]
    if job.restarts:
        environ["SLURM_RESTART_COUNT"] = str(job.restarts)
    return environ
