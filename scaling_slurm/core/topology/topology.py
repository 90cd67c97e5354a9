"""The ranks as they run: process groups, device and the few collectives that everybody needs; Layout counts them.

A process alone has no process group at all, and every collective is then the identity.
"""

import gc
import json
import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from scaling_slurm.core.config import TopologyConfig
from scaling_slurm.core.topology.layout import Layout, derive_layout
from scaling_slurm.errors import ConfigError, ScalingError
from scaling_slurm.rendezvous import Rendezvous
from scaling_slurm.run_directory import read_json, write_atomically

AXES = ("pipeline", "data", "tensor")
PORTS_TO_TRY = 64
POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Topology:
    """This rank's place in the layout; Topology() is a process alone on the CPU.

    `mesh` has the axes "pipeline", "data" and "tensor"; None alone.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None

    @classmethod
    def initialize(
        cls, rendezvous: Rendezvous, config: TopologyConfig, *, timeout: timedelta, publish: Path | None = None
    ) -> "Topology":
        """Meet the other ranks and build the process groups: gloo on CPUs, nccl on GPUs.

        Rank 0 listens and writes its address to `publish`, which the other ranks read; without `publish` all use the
        rendezvous' own address and port, and under torchrun its store. `timeout` holds for meeting and for every later
        collective. Raises ConfigError for a layout that does not fit the world size, ScalingError when ranks miss.
        """
        layout = derive_layout(config, rendezvous.world_size)
        device = select_device(rendezvous.local_rank)
        if rendezvous.world_size == 1:
            return cls(layout, 0, device)
        _join(rendezvous, device, timeout, publish)
        return cls(layout, rendezvous.rank, device, _build_mesh(layout, rendezvous.rank, device, timeout))

    @property
    def data_rank(self) -> int:
        """Which copy of the model this rank belongs to."""
        return self.layout.coordinates(self.rank)[1]

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same weights; None where there is only one."""
        return self._group("data", self.layout.data)

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks; None alone."""
        return None if self.mesh is None else dist.group.WORLD

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values = [value] * self.layout.world_size
        if self.mesh is not None:
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of the rank `source`; the other ranks' are ignored."""
        values = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(values, src=source)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.barrier()

    def close(self) -> None:
        """Leave the process groups, for good; waits for nobody."""
        if self.mesh is None:
            return
        dist.destroy_process_group()
        self.mesh = None
        # The groups' threads end with the last reference. One that still held a tensor of the last collective while the
        # interpreter shuts down would abort the process.
        gc.collect()

    def _group(self, axis: str, size: int) -> dist.ProcessGroup | None:
        return None if self.mesh is None or size == 1 else self.mesh.get_group(axis)


def select_device(local_rank: int) -> torch.device:
    """The GPU (CUDA or ROCm) of a rank on its node, else the CPU. A rank that sees one GPU only takes that one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(rendezvous: Rendezvous, device: torch.device, timeout: timedelta, publish: Path | None) -> None:
    """Create the default process group; raises ScalingError with one line that names the meeting place."""
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {"backend": "nccl" if on_gpu else "gloo", "device_id": device if on_gpu else None}
    options |= {"rank": rendezvous.rank, "world_size": rendezvous.world_size, "timeout": timeout}
    if rendezvous.source == "torchrun":
        place, store = f"{rendezvous.address}:{rendezvous.port}", None
        options["init_method"] = "env://"
    else:
        store = _open_store(rendezvous, timeout, publish)
        place = f"{store.host}:{store.port}"
        options["store"] = store
    started = time.monotonic()
    try:
        if store is not None:
            _compare_world_sizes(store, rendezvous, place)
        dist.init_process_group(**options)
    except (dist.DistError, RuntimeError) as error:
        waited = time.monotonic() - started
        missing = _missing_ranks(store, rendezvous.world_size) if store is not None else ""
        raise ScalingError(
            f"rank {rendezvous.rank} of {rendezvous.world_size} could not join the others at {place}"
            f" in {waited:.0f} s{missing}: {_first_line(error)}",
            "every rank must start and reach that address",
            "see the logs of the other ranks, or raise trainer.timeout_minutes",
        ) from error


def _open_store(rendezvous: Rendezvous, timeout: timedelta, publish: Path | None) -> TCPStore:
    if rendezvous.rank == 0:
        store = _listen(rendezvous, timeout)
        if publish is not None:
            write_atomically(publish, json.dumps({"address": store.host, "port": store.port}))
        return store
    host, port = rendezvous.address or "localhost", rendezvous.port
    if publish is not None:
        host, port = _await_address(publish, timeout)
    try:
        return TCPStore(host, port, rendezvous.world_size, is_master=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise ScalingError(
            f"rank {rendezvous.rank} cannot connect to rank 0 at {host}:{port}: {_first_line(error)}",
            "rank 0 must be alive and that address reachable from this node",
            "see rank 0's log; a cluster may need another network name for its nodes",
        ) from error


def _listen(rendezvous: Rendezvous, timeout: timedelta) -> TCPStore:
    host, first = rendezvous.address or "localhost", rendezvous.port
    for port in range(first, first + PORTS_TO_TRY):
        try:
            store = TCPStore(host, port, rendezvous.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as error:
            if "EADDRINUSE" not in str(error):
                raise ScalingError(f"rank 0 cannot listen at {host}:{port}: {_first_line(error)}") from error
            logger.warning("port %d is in use on %s, trying the next one", port, rendezvous.host)
        else:
            return store
    raise ScalingError(f"rank 0 found all ports from {first} to {first + PORTS_TO_TRY - 1} in use on {rendezvous.host}")


def _await_address(publish: Path, timeout: timedelta) -> tuple[str, int]:
    deadline = time.monotonic() + timeout.total_seconds()
    while (record := read_json(publish)) is None:
        if time.monotonic() > deadline:
            raise ScalingError(
                f"{publish} did not appear within {timeout.total_seconds():.0f} s",
                "rank 0 writes it once it listens",
                "see rank 0's log; the run directory must be on a file system that all nodes share",
            )
        time.sleep(POLL_SECONDS)
    return str(record["address"]), int(record["port"])


def _compare_world_sizes(store: Store, rendezvous: Rendezvous, place: str) -> None:
    """Ranks of different world sizes would wait for each other until the timeout."""
    store.set(f"joined/{rendezvous.rank}", str(rendezvous.world_size))
    theirs = int(store.get("joined/0"))
    if theirs != rendezvous.world_size:
        raise ConfigError(
            f"rank {rendezvous.rank} was started as one of {rendezvous.world_size} ranks,"
            f" but rank 0 at {place} as one of {theirs}",
            "all ranks must be started together",
            "check the launcher's variables WORLD_SIZE or SLURM_STEP_NUM_TASKS",
        )


def _missing_ranks(store: Store, world_size: int) -> str:
    try:
        missing = [rank for rank in range(world_size) if not store.check([f"joined/{rank}"])]
    except (dist.DistError, RuntimeError):
        return ", rank 0 is gone"
    return f", missing ranks: {', '.join(map(str, missing[:8]))}{' ...' * (len(missing) > 8)}" if missing else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _build_mesh(layout: Layout, rank: int, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Each rank takes part in the creation of its own groups only, so that the cost does not grow with the world."""
    world = tuple(range(layout.world_size))
    groups: dict[tuple[int, ...], Any] = {world: dist.group.WORLD}
    own = []
    for axis in range(len(AXES)):
        ranks = _axis_ranks(layout, rank, axis)
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        own.append(groups[ranks])
    mesh = torch.arange(layout.world_size).reshape(layout.pipeline, layout.data, layout.tensor)
    return DeviceMesh.from_group(own, device.type, mesh, mesh_dim_names=AXES)


def _axis_ranks(layout: Layout, rank: int, axis: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` on one axis only, itself included."""
    here = layout.coordinates(rank)
    there = [layout.coordinates(other) for other in range(layout.world_size)]
    return tuple(other for other, at in enumerate(there) if all(at[i] == here[i] for i in range(3) if i != axis))
