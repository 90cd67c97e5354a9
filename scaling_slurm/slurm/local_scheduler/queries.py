"""squeue and sacct: lists of jobs in the forms that are asked for."""

import os
import re
import sys
import time

from scaling_slurm.slurm.local_scheduler import jobs
from scaling_slurm.slurm.local_scheduler.control import format_duration, format_time
from scaling_slurm.slurm.local_scheduler.jobs import Job
from scaling_slurm.slurm.local_scheduler.options import SlurmError, fail

SHORT_STATES = {
    "PENDING": "PD", "RUNNING": "R", "COMPLETING": "CG", "COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA",
    "TIMEOUT": "TO", "NODE_FAIL": "NF",
}  # fmt: skip
SQUEUE_FORMAT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
SQUEUE_TITLES = {
    "i": "JOBID", "A": "JOBID", "F": "ARRAY_JOB_ID", "P": "PARTITION", "j": "NAME", "u": "USER", "t": "ST",
    "T": "STATE", "M": "TIME", "D": "NODES", "R": "NODELIST(REASON)", "r": "REASON", "N": "NODELIST", "S": "START_TIME",
    "e": "END_TIME", "l": "TIME_LIMIT", "L": "TIME_LEFT", "V": "SUBMIT_TIME", "k": "COMMENT", "Z": "WORK_DIR",
    "a": "ACCOUNT", "C": "CPUS",
}  # fmt: skip
TAKE_VALUE = {
    "-j": "jobs", "-o": "format", "-t": "states", "-u": "user", "-n": "name", "-p": "partition", "-S": "sort",
    "-w": "nodelist", "-A": "account", "-E": "endtime",
}  # fmt: skip


def _read(arguments: list[str], program: str) -> dict[str, str]:
    """Options of a query; flags that change nothing here are accepted."""
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        long = name.removeprefix("--") if word.startswith("--") else TAKE_VALUE.get(name, name)
        if program == "sacct" and name == "-n":
            long = "noheader"
        elif program == "sacct" and name == "-S":
            long = "starttime"
        elif name == "-h":
            long = "noheader"
        elif long in (*TAKE_VALUE.values(), "starttime") and not has_value:
            value = next(words, "")
        if not word.startswith("-"):
            raise SlurmError(f"Unrecognized option: {word}")
        options[long] = ",".join(filter(None, [options.get(long, ""), value])) if long == "jobs" else value
    return options


def _select(options: dict[str, str]) -> list[Job] | None:
    """The jobs that are asked for by id, name and user; None if there is a single id and it is unknown."""
    if "jobs" not in options:
        found = jobs.list_jobs()
    else:
        ids = [text for text in options["jobs"].split(",") if text]
        known = [jobs.load_job(int(text)) for text in ids if text.isdigit()]
        found = [job for job in known if job is not None]
        if len(ids) == 1 and not found:
            return None
    if "name" in options:
        found = [job for job in found if job.name in options["name"].split(",")]
    return found if options.get("user", jobs.user_name()) == jobs.user_name() else []


def squeue(arguments: list[str]) -> int:
    """Pending and running jobs, or those of --states."""
    try:
        options = _read(arguments, "squeue")
    except SlurmError as error:
        return fail("squeue", error)
    selected = _select(options)
    if selected is None:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    states = options.get("states", "").upper()
    if states != "ALL":
        wanted = states.split(",") if states else list(jobs.LIVE)
        selected = [job for job in selected if job.state in wanted or SHORT_STATES[job.state] in wanted]
    layout = options.get("format", SQUEUE_FORMAT)
    if "noheader" not in options:
        print(_fill(layout, SQUEUE_TITLES))
    for job in selected:
        print(_fill(layout, _squeue_fields(job)))
    return 0


def _squeue_fields(job: Job) -> dict[str, str]:
    started = job.start is not None
    nodes = jobs.format_nodes(job.node_names) if started else ""
    until = job.end if job.end and not job.is_live else time.time()
    left = "INVALID" if not job.end and job.time_limit else format_duration(job.end and max(0, job.end - time.time()))
    return {
        "i": str(job.id), "A": str(job.id), "F": str(job.id), "P": job.options.get("partition", "local"), "j": job.name,
        "u": jobs.user_name(), "t": SHORT_STATES[job.state], "T": job.state,
        "M": format_duration(until - job.start if job.start else 0), "D": str(job.nodes),
        "R": nodes or f"({job.reason})", "r": job.reason, "N": nodes,
        "S": format_time(job.start).replace("Unknown", "N/A"), "e": format_time(job.end).replace("Unknown", "N/A"),
        "l": format_duration(job.time_limit), "L": left, "V": format_time(job.submitted),
        "k": job.options.get("comment", "(null)"), "Z": job.directory, "a": job.options.get("account", "(null)"),
        "C": str(job.num_tasks * int(job.options.get("cpus-per-task", 1))),
    }  # fmt: skip


def _fill(layout: str, fields: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        text = fields.get(match[3], "")
        if not match[2]:
            return text
        width = int(match[2])
        return text[:width].rjust(width) if match[1] else text[:width].ljust(width)

    return re.sub(r"%(\.?)(\d*)([A-Za-z])", replace, layout)


def sacct(arguments: list[str]) -> int:
    """Jobs of any state; steps are not listed."""
    try:
        options = _read(arguments, "sacct")
    except SlurmError as error:
        return fail("sacct", error)
    layout = options.get("format") or options.get("-o") or "JobID,JobName,Partition,State,ExitCode"
    names = [name.partition("%")[0] for name in layout.split(",")]
    parsable = any(flag in options for flag in ("parsable2", "-P", "parsable", "-p"))

    def line(values: list[str]) -> str:
        return "|".join(values) if parsable else " ".join(value[:20].rjust(20) for value in values)

    if "noheader" not in options:
        print(line(names))
    for job in _select(options) or []:
        fields = _sacct_fields(job)
        print(line([fields.get(name.lower(), "") for name in names]))
    return 0


def _sacct_fields(job: Job) -> dict[str, str]:
    nodes = jobs.format_nodes(job.node_names) if job.start else "None assigned"
    state = f"CANCELLED by {os.getuid()}" if job.state == "CANCELLED" else job.state
    return {
        "jobid": str(job.id), "jobidraw": str(job.id), "jobname": job.name, "state": state,
        "partition": job.options.get("partition", "local"), "account": job.options.get("account", ""),
        "exitcode": f"{max(job.exit_status, 0)}:{max(-job.exit_status, 0)}", "nodelist": nodes,
        "submit": format_time(job.submitted), "start": format_time(job.start),
        "end": "Unknown" if job.is_live else format_time(job.end),
        "timelimit": format_duration(job.time_limit, hours=True), "user": jobs.user_name(),
        "nnodes": str(job.nodes), "ntasks": str(job.num_tasks), "reason": job.reason, "workdir": job.directory,
    }  # fmt: skip
