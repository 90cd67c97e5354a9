"""The cluster profile: everything that a site decides, one YAML file a site. Knows no run, no model and no template."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, StrictInt, field_validator

from scaling_slurm.resources import find, shipped_folder
from scaling_slurm.settings import Duration, Loaded, Settings, load_settings

PLANNED_DIRECTIVES = {
    "nodes": "--nodes or allocation.nodes",
    "ntasks-per-node": "allocation.tasks_per_node",
    "time": "--time or allocation.time",
}
"""A profile may remove these, but their values belong to the run, with what sets them: the plan reckons with them."""

DirectiveName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Directive = str | StrictInt | Literal[True]


class PartitionConfig(Settings):
    """Limits of one partition; what is left out is not checked."""

    max_time: Duration | None = None
    """Longest time limit of a job, which is also the default."""
    max_nodes: PositiveInt | None = None
    min_nodes: PositiveInt = 1
    qos: str | None = None
    """Quality of service that jobs here need."""


class GpuConfig(Settings):
    """The GPUs of a node."""

    model: str = ""
    """As people call it: A100, GH200, MI250X."""
    memory_gib: PositiveFloat | None = None
    """Of one GPU as the scheduler counts them; a plan that does not fit is refused."""
    per_node: NonNegativeInt = 0
    """GPUs of a node; by default a job has one rank for each."""
    request: Literal["gres", "gpus_per_node", "gpus_per_task", "none"] = "gres"
    """The form in which the site takes the request; "none" where whole nodes are given out unasked."""
    type: str | None = None
    """Type in the request, as in gpu:h100:4."""


class CpuConfig(Settings):
    """The cores of a node."""

    per_node: PositiveInt | None = None
    """Cores that a job may use."""
    per_task: PositiveInt | None = None
    """Cores of each rank; by default nothing is asked for, and the site's default counts."""


class SrunConfig(Settings):
    """Options of the srun that starts the ranks."""

    cpu_bind: str | None = None
    gpu_bind: str | None = None
    mpi: str | None = None
    extra: tuple[str, ...] = ()
    """Further options, one an element: "--threads-per-core=1"."""


class NetworkConfig(Settings):
    """How ranks find each other. Interfaces are chosen by variables in env, such as NCCL_SOCKET_IFNAME."""

    master_address_suffix: str = ""
    """Appended to the name of rank 0's host, where another name leads to the fast network."""


class SignalConfig(Settings):
    """The warning, SIGUSR2 to every rank, that the time limit comes near."""

    lead_seconds: PositiveInt = 120
    """How long before the limit; Slurm may send it up to a minute earlier. A checkpoint must fit into it."""


class ClusterProfile(Settings):
    """One site. Any directive that the job template writes can be replaced, removed or added here."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str
    """One line for `scaling clusters`."""
    verified: str
    """When and how the facts below were last checked on the machine; verified: "no" where they were not."""
    source: tuple[str, ...] = ()
    """Where the facts come from."""
    scheduler: Literal["slurm", "local"] = "slurm"
    """local: the stand-in for Slurm that runs jobs on this machine."""
    partitions: dict[str, PartitionConfig] = Field(default_factory=dict)
    """Known partitions; empty: any name is taken."""
    default_partition: str | None = None
    """Partition of a job that names none; without it the scheduler chooses."""
    account: str | None = None
    """Account of a job that names none; --account, $SCALING_ACCOUNT and $SBATCH_ACCOUNT come before it."""
    account_required: bool = False
    gpu: GpuConfig = GpuConfig()
    cpu: CpuConfig = CpuConfig()
    memory: str | None = None
    """Memory of a node as Slurm's --mem takes it: "480G", or "0" for all of it."""
    srun: SrunConfig = SrunConfig()
    network: NetworkConfig = NetworkConfig()
    login_shell: bool = False
    """Run the job script as a login shell: where `module` is undefined otherwise."""
    modules: tuple[str, ...] = ()
    """Loaded in this order; a module that cannot be loaded ends the job."""
    setup: tuple[str, ...] = ()
    """Lines of bash between the modules and the variables: unset PYTHONPATH, source venv/bin/activate."""
    env: dict[VariableName, str | StrictInt | None] = Field(default_factory=dict)
    """Variables of every rank; one that the user exported wins, and the log says so. null unsets it for everybody."""
    python: str | None = None
    """Command that starts Python in the job, without shell expansions; by default the Python that submits."""
    directives: dict[DirectiveName, Directive | None] = Field(default_factory=dict)
    """#SBATCH options by their long names: a value replaces or adds one, true adds a bare flag, null removes one."""
    signal: SignalConfig = SignalConfig()
    requeue_allowed: bool = True
    """Whether users may requeue their jobs here; if not, a stopped run waits for `scaling resume`."""
    runs_directory: str | None = None
    """Where run directories are made, on a file system that all nodes share; $VARIABLES and ~ are expanded."""
    poll_seconds: PositiveInt = 30
    """Shortest time between two questions to the scheduler."""

    @field_validator("python")
    @classmethod
    def _words(cls, python: str | None) -> str | None:
        if python is not None and not shlex.split(python):
            raise ValueError("it is empty; leave it out to use the Python that submits")
        return python

    @field_validator("directives")
    @classmethod
    def _only_removable(cls, directives: dict[str, Directive | None]) -> dict[str, Directive | None]:
        for name, value in directives.items():
            if name in PLANNED_DIRECTIVES and value is not None:
                raise ValueError(
                    f"{name} belongs to the run's allocation: {PLANNED_DIRECTIVES[name]} sets it; "
                    "here it can only be removed"
                )
            if value == "":
                raise ValueError(f"{name} is empty; null removes it, true makes it a bare flag")
        return directives


def load_cluster(
    name_or_path: str, *, overrides: Sequence[str] = (), directives: Mapping[str, Directive | None] | None = None
) -> Loaded[ClusterProfile]:
    """Find a profile by its name or path and read it.

    Args:
        overrides: Dotted settings, "gpu.per_node=8".
        directives: Last word on #SBATCH options, from the command line.

    Raises ConfigError.
    """
    path = find("clusters", name_or_path)
    assigned = [f"directives.{name}={json.dumps(value)}" for name, value in (directives or {}).items()]
    shipped = shipped_folder("clusters")
    return load_settings(ClusterProfile, path, overrides=[*overrides, *assigned], shipped=shipped)


def find_account(profile: ClusterProfile, given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The account that a job is charged to: given, from the environment (as with sbatch), or the profile's."""
    return given or environ.get("SCALING_ACCOUNT") or environ.get("SBATCH_ACCOUNT") or profile.account
