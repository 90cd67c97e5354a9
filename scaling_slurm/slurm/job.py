"""One job as Slurm is asked for it: the request, its #SBATCH directives, its problems with the site's limits.

Knows what a site allows, not what runs inside.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaling_slurm.errors import ConfigError
from scaling_slurm.settings import Duration
from scaling_slurm.slurm.cluster import ClusterProfile, Directive, find_account

DIRECTIVES = (
    *("job-name", "account", "partition", "qos", "nodes", "ntasks-per-node", "cpus-per-task", "gres", "gpus-per-node"),
    *("gpus-per-task", "mem", "time", "signal", "requeue", "no-requeue", "open-mode", "output"),
)
"""What a job script may hold by itself, and a profile may therefore remove."""
WARNING_SLACK_SECONDS = 60
"""Slurm's warning may come this much before its time (https://slurm.schedmd.com/sbatch.html#OPT_signal)."""


@dataclass(frozen=True)
class JobRequest:
    """What Slurm gets. `directives` is complete and in order; the other fields are what the plan reckons with."""

    name: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    time: Duration | None
    account: str | None
    partition: str | None
    requeue: bool
    directives: dict[str, Directive]

    @property
    def num_tasks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.tasks_per_node


def build_request(
    profile: ClusterProfile,
    *,
    name: str,
    output: Path,
    nodes: int,
    tasks_per_node: int | None = None,
    time: Duration | None = None,
    account: str | None = None,
    partition: str | None = None,
    requeue: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> JobRequest:
    """Fill in what the site decides. Checks nothing: `find_problems` does.

    Args:
        output: Log of the job script; "%j" in it stands for the job id.
        tasks_per_node: By default one for each GPU of a node, or one.
        time: By default the longest of the partition.
        requeue: Whether the run wants to be requeued; the site must allow it too.
    """
    partition = partition or profile.default_partition
    limits = profile.partitions.get(partition or "")
    account = find_account(profile, account, environ)
    time = time or (limits.max_time if limits else None)
    tasks = tasks_per_node or profile.gpu.per_node or 1
    gpus = min(tasks, profile.gpu.per_node)
    requeue = requeue and profile.requeue_allowed
    wanted: dict[str, Directive | None] = {
        "job-name": name,
        "account": account,
        "partition": partition,
        "qos": limits.qos if limits else None,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": profile.cpu.per_task,
        **_gpu_directive(profile, gpus),
        "mem": profile.memory,
        "time": time.slurm() if time else None,
        "signal": f"USR2@{profile.signal.lead_seconds}",
        "requeue" if requeue else "no-requeue": True,
        "open-mode": "append",
        "output": str(output),
        **profile.directives,
    }
    return JobRequest(
        name=name,
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=profile.cpu.per_task,
        gpus_per_node=gpus,
        time=time,
        account=account,
        partition=partition,
        requeue=requeue,
        directives={key: value for key, value in wanted.items() if value is not None},
    )


def _gpu_directive(profile: ClusterProfile, gpus_per_node: int) -> dict[str, Directive | None]:
    count = f"{profile.gpu.type}:{gpus_per_node}" if profile.gpu.type else str(gpus_per_node)
    match profile.gpu.request if gpus_per_node else "none":
        case "gres":
            return {"gres": f"gpu:{count}"}
        case "gpus_per_node":
            return {"gpus-per-node": count}
        case "gpus_per_task":
            return {"gpus-per-task": f"{profile.gpu.type}:1" if profile.gpu.type else "1"}
        case _:
            return {}


def find_problems(request: JobRequest, profile: ClusterProfile) -> list[ConfigError]:
    """Everything for which the site would refuse the job, or let it wait for ever; and removals that remove nothing."""
    return [
        *_removal_problems(profile),
        *_partition_problems(request, profile),
        *_node_problems(request, profile),
        *_time_problems(request, profile),
    ]


def _removal_problems(profile: ClusterProfile) -> Iterator[ConfigError]:
    for name, value in profile.directives.items():
        if value is None and name not in DIRECTIVES:
            near = difflib.get_close_matches(name, DIRECTIVES, n=1)
            yield ConfigError(
                f"directives.{name} is null, but the job script never writes --{name}",
                f"did you mean {near[0]}?" if near else f"it writes {', '.join(DIRECTIVES)}",
                f"directives in the profile of {profile.name}, or --sbatch",
            )


def _partition_problems(request: JobRequest, profile: ClusterProfile) -> Iterator[ConfigError]:
    if profile.account_required and not request.account:
        yield ConfigError(
            f"{profile.name} charges every job to an account, and none is given",
            "name your project",
            "--account, or $SCALING_ACCOUNT",
        )
    if request.partition and profile.partitions and request.partition not in profile.partitions:
        nearest = difflib.get_close_matches(request.partition, profile.partitions, n=1)
        yield ConfigError(
            f"{profile.name} has no partition {request.partition!r}",
            f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(profile.partitions)}",
            f"--partition, or partitions in the profile of {profile.name}",
        )


def _node_problems(request: JobRequest, profile: ClusterProfile) -> Iterator[ConfigError]:
    limits = profile.partitions.get(request.partition or "")
    if limits and limits.max_nodes and request.nodes > limits.max_nodes:
        yield ConfigError(
            f"{request.nodes} nodes are more than the {limits.max_nodes} of partition {request.partition}",
            _partitions_for(request, profile),
            "--nodes, or allocation.nodes in the run file",
        )
    if limits and request.nodes < limits.min_nodes:
        yield ConfigError(
            f"{request.nodes} nodes are fewer than the {limits.min_nodes} that partition {request.partition} asks for",
            _partitions_for(request, profile),
            "--nodes, or allocation.nodes in the run file",
        )
    tasks, gpus, cores = request.tasks_per_node, profile.gpu.per_node, profile.cpu.per_node
    if gpus and tasks > gpus:
        yield ConfigError(
            f"{tasks} tasks per node want a GPU each, but a node of {profile.name} has {gpus}",
            f"use at most {gpus}",
            "allocation.tasks_per_node in the run file",
        )
    elif cores and tasks * (request.cpus_per_task or 1) > cores:
        yield ConfigError(
            f"{tasks} tasks per node x {request.cpus_per_task or 1} cores are more than the {cores} of a node",
            "use fewer tasks, or fewer cores for each",
            f"allocation.tasks_per_node in the run file, or cpu.per_task in the profile of {profile.name}",
        )


def _partitions_for(request: JobRequest, profile: ClusterProfile) -> str:
    fitting = [
        name
        for name, limits in profile.partitions.items()
        if limits.min_nodes <= request.nodes <= (limits.max_nodes or request.nodes)
    ]
    return f"partition {' or '.join(fitting)} takes that many" if fitting else "no known partition takes that many"


def _time_problems(request: JobRequest, profile: ClusterProfile) -> Iterator[ConfigError]:
    limits = profile.partitions.get(request.partition or "")
    longest = limits.max_time if limits else None
    if request.time and longest and request.time > longest:
        jobs = -(-request.time.seconds // longest.seconds)
        yield ConfigError(
            f"time {request.time.slurm()} is over the limit {longest.slurm()} of partition {request.partition}",
            f"ask for {longest.slurm()}: {jobs} jobs of it last as long, and each continues where the last one stopped",
            "--time, or allocation.time in the run file",
        )
    lead = profile.signal.lead_seconds
    if request.time and request.time.seconds <= lead:
        yield ConfigError(
            f"the time limit {request.time.slurm()} leaves nothing before the warning, {lead} s ahead of it",
            f"allow at least {Duration(lead + 2 * WARNING_SLACK_SECONDS).slurm()}",
            f"--time, or signal.lead_seconds in the profile of {profile.name}",
        )
