"""scontrol and scancel: what changes a job, and the little of `scontrol show` that job scripts and we use."""

import os
import signal
import sys
import time

from scaling_slurm.slurm.local_scheduler import jobs
from scaling_slurm.slurm.local_scheduler.jobs import Job
from scaling_slurm.slurm.local_scheduler.options import SlurmError, fail, parse_signal
from scaling_slurm.slurm.local_scheduler.processes import descendants, send_signal, send_to_tree


def scontrol(arguments: list[str]) -> int:
    """requeue, show job, show hostnames, ping."""
    oneliner = any(word in ("-o", "--oneliner") for word in arguments)
    words = [word for word in arguments if not word.startswith("-")]
    match words:
        case ["requeue", *job_ids] if job_ids:
            return max(_requeue(job_id) for text in job_ids for job_id in text.split(","))
        case ["show", ("job" | "jobs"), *job_ids]:
            return _show_jobs(job_ids, oneliner)
        case ["show", "hostnames", *lists]:
            from scaling_slurm.rendezvous import expand_nodelist

            print("\n".join(expand_nodelist(lists[0] if lists else os.environ.get("SLURM_JOB_NODELIST", ""))))
            return 0
        case ["ping"]:
            print("Slurmctld(primary) at local is UP")
            return 0
        case _:
            print(f"invalid keyword: {' '.join(arguments)}", file=sys.stderr)
            return 1


def _find_job(text: str) -> Job | None:
    return jobs.load_job(int(text)) if text.isdigit() else None


def _requeue(text: str) -> int:
    job = _find_job(text)
    if job is None:
        problem = f"Invalid job id specified for job {text}"
    elif not job.is_live:
        problem = f"Job has already finished for job {text}"
    elif job.state == "PENDING":
        problem = f"Job is pending execution for job {text}"
    elif "no-requeue" in job.options:
        problem = f"Requested operation is presently disabled for job {text}"
    else:
        jobs.request(job, "requeue")
        return 0
    print(problem, file=sys.stderr)
    return 1


def _show_jobs(job_ids: list[str], oneliner: bool) -> int:
    found = [_find_job(text) for text in job_ids] if job_ids else jobs.list_jobs()
    for job in found:
        if job is None:
            print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
            return 1
        fields = _describe(job)
        separator = " " if oneliner else "\n   "
        print(separator.join(f"{key}={value}" for key, value in fields.items()) + ("" if oneliner else "\n"))
    if not found:
        print("No jobs in the system")
    return 0


def _describe(job: Job) -> dict[str, object]:
    options = job.options
    log = os.path.join(job.directory, jobs.fill_pattern(options.get("output", "slurm-%j.out"), job))
    elapsed = (job.end if job.end and not job.is_live else time.time()) - job.start if job.start else 0
    status = job.exit_status
    return {
        "JobId": job.id, "JobName": job.name, "UserId": f"{jobs.user_name()}({os.getuid()})",
        "Account": options.get("account", "(null)"), "QOS": options.get("qos", "(null)"), "JobState": job.state,
        "Reason": job.reason, "Dependency": options.get("dependency", "(null)"),
        "Requeue": int("no-requeue" not in options), "Restarts": job.restarts, "BatchFlag": 1,
        "ExitCode": f"{max(status, 0)}:{max(-status, 0)}", "RunTime": format_duration(elapsed),
        "TimeLimit": format_duration(job.time_limit, hours=True), "SubmitTime": format_time(job.submitted),
        "StartTime": format_time(job.start), "EndTime": format_time(job.end),
        "Partition": options.get("partition", "local"),
        "NodeList": jobs.format_nodes(job.node_names) if job.start else "(null)",
        "BatchHost": job.node_names[0], "NumNodes": job.nodes, "NumTasks": job.num_tasks,
        "Command": os.path.join(job.path, "script"), "WorkDir": job.directory,
        **({"Comment": options["comment"]} if "comment" in options else {}),
        "StdErr": log, "StdIn": "/dev/null", "StdOut": log,
    }  # fmt: skip


def format_time(seconds: float | None) -> str:
    """Local time in ISO form, or Unknown."""
    return "Unknown" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def format_duration(seconds: float | None, *, hours: bool = False) -> str:
    """[D-][HH:]MM:SS, or UNLIMITED. hours: write them even when there are none."""
    if seconds is None:
        return "UNLIMITED"
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    day, hour = divmod(hour, 24)
    if day:
        return f"{day}-{hour:02d}:{minute:02d}:{second:02d}"
    if hour or hours:
        return f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def scancel(arguments: list[str]) -> int:
    """End jobs, or send a signal to their steps, their batch shell (--batch) or both (--full)."""
    number: int | None = None
    names: list[str] = []
    targets: set[str] = set()
    ids: list[str] = []
    words = iter(arguments)
    try:
        for word in words:
            name, _, value = word.partition("=")
            if name in ("-s", "--signal"):
                number = parse_signal(value or next(words))
            elif name in ("-n", "--name", "--jobname"):
                names.append(value or next(words))
            elif name in ("-b", "--batch", "-f", "--full"):
                targets.add(name.strip("-")[0])
            elif name in ("-u", "--user"):
                ids += [str(job.id) for job in jobs.list_jobs() if (value or next(words)) == jobs.user_name()]
            elif name == "--me":
                ids += [str(job.id) for job in jobs.list_jobs()]
            elif word.startswith("-"):
                raise SlurmError(f"unrecognized option '{word}'")
            else:
                ids += word.split(",")
    except SlurmError as error:
        return fail("scancel", error)
    ids += [str(job.id) for job in jobs.list_jobs() if job.name in names]
    for text in ids:
        job_id, _, step = text.partition(".")
        job = _find_job(job_id)
        # Slurm's scancel says nothing about jobs that it does not know either.
        if job is None or not job.is_live:
            continue
        if number is None and not step:
            jobs.request(job, "cancel")
        else:
            _signal_job(job, number or signal.SIGKILL, targets, step)
    return 0


def _signal_job(job: Job, number: int, targets: set[str], step: str) -> None:
    if "b" in targets and job.script:
        send_signal(job.script.pid, number)
    elif "f" in targets and job.script:
        for pid in descendants(job.driver.pid):
            send_signal(pid, number)
    elif not targets:
        for known in jobs.list_steps(job):
            if step in ("", str(known.number)):
                for task in known.tasks:
                    send_to_tree(task, number)
