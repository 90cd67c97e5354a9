"""sbatch: takes a script, makes a job of it and starts its driver, which outlives the shell that submitted."""

import os
import re
import signal
import subprocess
import sys
import time

from scaling_slurm.slurm.local_scheduler.jobs import (
    Job,
    format_nodes,
    load_job,
    new_job_directory,
    replace_file,
    save_job,
    state_directory,
)
from scaling_slurm.slurm.local_scheduler.options import (
    SlurmError,
    fail,
    parse_count,
    parse_directives,
    parse_options,
    parse_time_limit,
    parse_warning,
    spread_tasks,
)
from scaling_slurm.slurm.local_scheduler.processes import Process, identify

MAX_NODES = 254
"""Nodes are 127.0.0.1 to 127.0.0.254."""


def sbatch(arguments: list[str]) -> int:
    """Submit a batch script; prints its job id."""
    try:
        given, rest = parse_options(arguments)
        script, name = _read_script(given, rest)
        options = parse_directives(script) | given
        nodes, tasks = _shape(options)
        time_limit = parse_time_limit(options["time"]) if "time" in options else None
        if "signal" in options:
            parse_warning(options["signal"])
        if not re.fullmatch(r"(afterany(:\d+)+)?", options.get("dependency", "")):
            raise SlurmError("Batch job submission failed: without Slurm, the only dependency is afterany:ID")
        if "array" in options:
            raise SlurmError("Batch job submission failed: job arrays are not supported without Slurm")
    except SlurmError as error:
        return fail("sbatch", error)
    directory = os.path.abspath(options.get("chdir", os.getcwd()))
    job_id = new_job_directory() if "test-only" not in options else 0
    job = Job(
        id=job_id, name=options.get("job-name", name), nodes=nodes, tasks_per_node=tasks, directory=directory,
        options=options, arguments=rest[1:], time_limit=time_limit, submitted=time.time(), driver=Process(0, 0, ""),
    )  # fmt: skip
    if "test-only" in options:
        start = time.strftime("%Y-%m-%dT%H:%M:%S")
        print(
            f"sbatch: Job {job_id} to start at {start} using {job.num_tasks} processors on nodes"
            f" {format_nodes(job.node_names)} in partition {options.get('partition', 'local')}",
            file=sys.stderr,
        )
        return 0
    _start(job, script)
    print(job_id if "parsable" in options else f"Submitted batch job {job_id}", flush=True)
    return _wait(job_id) if "wait" in options else 0


def _read_script(options: dict[str, str], rest: list[str]) -> tuple[str, str]:
    """The script's text and the job's name by default."""
    if "wrap" in options:
        return f"#!/bin/sh\n{options['wrap']}\n", "wrap"
    if not rest:
        text, name = sys.stdin.read(), "sbatch"
    else:
        name = os.path.basename(rest[0])
        try:
            with open(rest[0], encoding="utf-8") as file:
                text = file.read()
        except OSError:
            raise SlurmError(f"Unable to open file {rest[0]}") from None
    if not text.startswith("#!"):
        raise SlurmError(
            "This does not look like a batch script.  The first\n"
            "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
            "sbatch: error: For instance: #!/bin/sh"
        )
    return text, name


def _shape(options: dict[str, str]) -> tuple[int, list[int]]:
    """Number of nodes, and tasks of each."""
    nodes, tasks = parse_count(options, "nodes"), parse_count(options, "ntasks")
    per_node = parse_count(options, "ntasks-per-node")
    if nodes is None:
        nodes = -(-tasks // per_node) if tasks and per_node else 1
    if nodes > MAX_NODES or (tasks is not None and tasks < nodes):
        raise SlurmError("Batch job submission failed: Requested node configuration is not available")
    if tasks is None:
        return nodes, [per_node or 1] * nodes
    return nodes, spread_tasks(tasks, nodes)


def _start(job: Job, script: str) -> None:
    """Start the driver in a session of its own; it waits for the record, which names it."""
    path = os.path.join(job.path, "script")
    replace_file(path, script)
    os.chmod(path, 0o700)
    # A request may come before the driver can listen; it finds the request's file when it can.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    main = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
    with open(os.path.join(job.path, "driver.log"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", main, "driver", str(job.id)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd="/", start_new_session=True, env={**os.environ, "SCALING_LOCAL_STATE": state_directory()},
        )  # fmt: skip
    driver = identify(process.pid)
    if driver is None:
        raise RuntimeError(f"the driver of job {job.id} ended at once; see {job.path}/driver.log")
    # It is not ours to wait for.
    process.returncode = 0
    job.driver = driver
    save_job(job)


def _wait(job_id: int) -> int:
    while (job := load_job(job_id)) is not None and job.is_live:
        time.sleep(0.1)
    if job is None or job.exit_status < 0:
        return 1
    return job.exit_status
