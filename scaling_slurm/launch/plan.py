"""From a run file and a cluster profile to a job: everything that submitting would do, computed and shown, not done.

Reads files and asks no scheduler; what it writes into the plan's script is byte for byte what Slurm gets.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_slurm.core.topology.layout import BatchArithmetic, Layout, derive_batch, derive_layout
from scaling_slurm.errors import ConfigError, ExitCode
from scaling_slurm.launch import checks
from scaling_slurm.launch.checks import gib
from scaling_slurm.run_directory import RunDirectory
from scaling_slurm.settings import Loaded, fingerprint
from scaling_slurm.slurm.cluster import ClusterProfile
from scaling_slurm.slurm.executor import task_command
from scaling_slurm.slurm.job import JobRequest, build_request, find_problems
from scaling_slurm.slurm.template import find_template, render
from scaling_slurm.transformer.config import RunConfig
from scaling_slurm.transformer.flops import (
    MemoryEstimate,
    ParameterCount,
    checkpoint_bytes,
    count_parameters,
    estimate_memory,
    training_flops_per_token,
)

RANKS_WITH_OWN_LOG = 64
"""Above this many ranks there is one log file a node, to spare the file system."""


@dataclass(frozen=True)
class JobPlan:
    """One job, ready to be sent unless it has problems."""

    run_directory: Path
    config: RunConfig
    """With absolute paths."""
    cluster: ClusterProfile
    request: JobRequest
    layout: Layout
    batch: BatchArithmetic
    parameters: ParameterCount
    memory: MemoryEstimate
    python: tuple[str, ...]
    """Words of the command that starts Python in the job."""
    profile_file: Path
    template_file: Path
    command: str
    """What srun runs in each task, as shell text."""
    script: str
    problems: tuple[ConfigError, ...]
    """Reasons to refuse the submission."""
    obstacles: tuple[ConfigError, ...]
    """What is not ready here: submitting is refused, planning on a laptop for a far cluster is not."""
    notes: tuple[str, ...]
    """What deserves a look, and refuses nothing."""

    @property
    def run_id(self) -> str:
        return self.run_directory.name

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs of one token over all ranks."""
        return training_flops_per_token(self.config.model)

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.config.model.sequence_length

    @property
    def node_hours(self) -> float | None:
        """Of one job that lasts to its limit; None without a limit."""
        return None if self.request.time is None else self.request.nodes * self.request.time.seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        """As billed where nodes are not shared: of all GPUs of the nodes."""
        return None if self.node_hours is None else self.node_hours * self.cluster.gpu.per_node


def plan(
    run: Loaded[RunConfig],
    cluster: Loaded[ClusterProfile],
    *,
    runs_root: Path,
    account: str | None = None,
    partition: str | None = None,
    run_id: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> JobPlan:
    """Plan a run's next job; raises ConfigError where not even a script can be written.

    Args:
        runs_root: Folder of the run directories.
        run_id: Of an existing run that is to continue; by default the next free one of these settings.
    """
    config, profile = run.value.with_absolute_paths(), cluster.value
    runs_root = runs_root.absolute()
    directory = RunDirectory(runs_root / (next_run_id(config, runs_root) if run_id is None else run_id))
    request = _request(config, profile, directory, account, partition, environ)
    site_problems = find_problems(request, profile)
    try:
        layout = derive_layout(config.topology, request.num_tasks)
        batch = derive_batch(config.trainer, layout)
    except ConfigError as error:
        # Too many nodes do not fit the batch either, and only the first is the mistake.
        raise (site_problems or [error])[0] from None
    memory = estimate_memory(
        config.model,
        layout,
        precision=config.trainer.precision,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
    )
    python = tuple(shlex.split(profile.python)) if profile.python else (sys.executable,)
    command = task_command(directory.submitit, shlex.join(python))
    return JobPlan(
        run_directory=directory.path,
        config=config,
        cluster=profile,
        request=request,
        layout=layout,
        batch=batch,
        parameters=count_parameters(config.model),
        memory=memory,
        python=python,
        command=command,
        profile_file=cluster.path,
        template_file=find_template("train"),
        script=render("train", script_context(request, profile, directory, python, command)),
        problems=(
            *checks.model_problems(config.model, layout),
            *checks.data_problems(config.data, config.model.vocab_size),
            *site_problems,
            *checks.memory_problems(memory, profile),
            *checks.path_problems(directory.path, runs_root),
        ),
        obstacles=(
            *checks.unsupported_layout(layout),
            *checks.unusable_data(config, run.origins),
            *checks.storage_problems(config, request, directory.path),
        ),
        notes=tuple(checks.find_notes(config, request, profile, memory, directory.path)),
    )


def _request(
    config: RunConfig,
    profile: ClusterProfile,
    directory: RunDirectory,
    account: str | None,
    partition: str | None,
    environ: Mapping[str, str],
) -> JobRequest:
    return build_request(
        profile,
        name=directory.id,
        output=directory.logs / "job-%j.log",
        nodes=config.allocation.nodes,
        tasks_per_node=config.allocation.tasks_per_node,
        time=config.allocation.time,
        account=account,
        partition=partition,
        requeue=config.trainer.requeue.enabled,
        environ=environ,
    )


def next_run_id(config: RunConfig, runs_root: Path) -> str:
    """<name>-<fingerprint of the settings>-<next free number>; whoever makes the directory first has it."""
    prefix = f"{config.name}-{fingerprint(config)}-"
    taken = (entry.name.removeprefix(prefix) for entry in runs_root.glob(f"{prefix}*"))
    return f"{prefix}{max((int(number) for number in taken if number.isdecimal()), default=0) + 1}"


def script_context(
    request: JobRequest, profile: ClusterProfile, directory: RunDirectory, python: tuple[str, ...], command: str
) -> dict[str, Any]:
    """The variables of train.sbatch.j2. `command` and `failure_command` are shell text, everything else is values."""
    srun = profile.srun
    options = {
        "cpus-per-task": request.cpus_per_task,
        "cpu-bind": srun.cpu_bind,
        "gpu-bind": srun.gpu_bind,
        "mpi": srun.mpi,
    }
    return {
        "login_shell": profile.login_shell,
        "directives": request.directives,
        "run_directory": directory.path,
        "modules": profile.modules,
        "setup": profile.setup,
        "env": profile.env,
        "threads": request.cpus_per_task,
        "master_address_suffix": profile.network.master_address_suffix,
        "srun_options": [*(f"--{name}={value}" for name, value in options.items() if value is not None), *srun.extra],
        "log_per_node": request.num_tasks > RANKS_WITH_OWN_LOG,
        "command": command,
        "failure_command": f"{shlex.join(python)} -m scaling_slurm.launch.failure",
        "requeue_exit_code": int(ExitCode.REQUEUE),
    }


def describe(job: JobPlan) -> str:
    """The plan for people: layout, batch, parameters, memory, cost, place."""
    config, request, layout, batch, memory = job.config, job.request, job.layout, job.batch, job.memory
    gpus = f", {request.gpus_per_node} x {job.cluster.gpu.model or 'GPU'} a node" if request.gpus_per_node else ""
    limit = request.time.slurm() if request.time else "the site's default"
    cost = f"{job.node_hours:,.1f} node-hours" if job.node_hours is not None else "unknown without a time limit"
    if job.gpu_hours:
        cost = f"{job.gpu_hours:,.1f} GPU-hours, {cost}"
    flops = job.flops_per_token * job.tokens_per_step
    rows = {
        "run": job.run_id,
        "directory": str(job.run_directory),
        "cluster": f"{job.cluster.name}: {job.cluster.description}",
        "profile": str(job.profile_file),
        "template": str(job.template_file),
        "job": f"{request.nodes} nodes x {request.tasks_per_node} ranks{gpus}; limit {limit}",
        "charged to": f"account {request.account or '-'}, partition {request.partition or '-'}",
        "cost at the limit": cost,
        "layout": f"{layout.world_size} ranks = "
        f"{layout.data} data x {layout.pipeline} pipeline x {layout.tensor} tensor",
        "batch": f"{batch.global_batch_size} sequences = {batch.micro_batch_size} micro x "
        f"{batch.accumulation} accumulated x {layout.data} data; {job.tokens_per_step:,} tokens a step",
        "length": f"{config.trainer.num_steps:,} steps, {config.trainer.num_steps * job.tokens_per_step:,} tokens",
        "parameters": f"{job.parameters.total:,}, of which {job.parameters.matmul:,} are multiplied with each token",
        "compute": f"{job.flops_per_token / 1e9:,.3g} GFLOP a token, {flops / 1e15:,.3g} PFLOP a step",
        "memory a rank": f"{gib(memory.total)} = {gib(memory.weights)} weights + {gib(memory.gradients)} gradients + "
        f"{gib(memory.optimizer)} optimizer + {gib(memory.activations)} activations + {gib(memory.loss)} loss",
        "checkpoint": gib(checkpoint_bytes(config.model, config.trainer.precision)),
    }
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, *(f"{'note':{width}}  {note}" for note in job.notes)])
