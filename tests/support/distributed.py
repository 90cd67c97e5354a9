"""Runs a function on several ranks: processes forked from a server that has torch loaded, over gloo on the loopback.

Knows nothing of what the function does; function, arguments and results travel as pickles.
"""

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from scaling_slurm.core.config import TopologyConfig
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.rendezvous import Rendezvous

FIRST_PORT = 23000
GRACE_SECONDS = 1.0
"""How long the other ranks may still report once one has failed, so that the cause is told apart from its echoes."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch.distributed.device_mesh", "tests.support.distributed"])


class RankError(AssertionError):
    """A rank raised, died or did not finish; holds its traceback."""


def local_rendezvous(rank: int, world_size: int, port: int = FIRST_PORT, address: str = "127.0.0.1") -> Rendezvous:
    """A rank of several on this machine, as if Slurm had started it."""
    return Rendezvous(rank, world_size, rank, world_size, 0, address, port, "slurm", "localhost", "1")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float | None = None,
    config: TopologyConfig | None = None,
) -> list[Any]:
    """function(topology, *args) on each of `world_size` ranks; what it returned, by rank.

    The function must be importable (module level). The first rank that fails is raised here as RankError with its
    traceback; ranks that are not done after `timeout` seconds are killed, and the error tells where they were.
    A collective fails after `group_timeout`, by default that same time.
    """
    task = pickle.dumps((function, args, config or TopologyConfig(), timedelta(seconds=group_timeout or timeout)))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(target=_run_rank, args=(rank, world_size, task, pipes[rank][1], folder, timeout))
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _collect([receiver for receiver, _ in pipes], deadline, Path(folder))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], deadline: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    waiting = dict(enumerate(receivers))
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting.values()), timeout=remaining)
        for rank, receiver in list(waiting.items()):
            if receiver not in ready:
                continue
            del waiting[rank]
            try:
                results[rank] = _unpack(receiver.recv_bytes())
            except EOFError:
                failures[rank] = (0.0, "the process died without a word")
            except RankError as error:
                failures[rank] = error.args
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        first = min(failures, key=failures.__getitem__)
        raise RankError(f"rank {first} of {len(receivers)} failed:\n{failures[first][1]}")
    if waiting:
        stacks = "\n".join(f"rank {rank}:\n{_stack_file(folder, rank).read_text()}" for rank in waiting)
        raise RankError(f"ranks {sorted(waiting)} of {len(receivers)} did not finish in time\n{stacks}")
    return [results[rank] for rank in range(len(receivers))]


def _unpack(reply: bytes) -> Any:
    result, failure = pickle.loads(reply)
    if failure is not None:
        raise RankError(*failure)
    return result


def _stack_file(folder: Path, rank: int) -> Path:
    path = folder / f"stack-{rank}"
    path.touch()
    return path


def _run_rank(rank: int, world_size: int, task: bytes, sender: Connection, folder: str, timeout: float) -> None:
    torch.set_num_threads(1)
    with open(_stack_file(Path(folder), rank), "w") as stack:
        faulthandler.dump_traceback_later(timeout * 0.9, file=stack)
        try:
            function, args, config, group_timeout = pickle.loads(task)
            topology = Topology.initialize(
                local_rendezvous(rank, world_size),
                config,
                timeout=group_timeout,
                publish=Path(folder) / "rendezvous.json",
            )
            result = function(topology, *args)
            reply = pickle.dumps((result, None))
            topology.close()
        except BaseException:
            reply = pickle.dumps((None, (time.time(), traceback.format_exc())))
        faulthandler.cancel_dump_traceback_later()
        sender.send_bytes(reply)
