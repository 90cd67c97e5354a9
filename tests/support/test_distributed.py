import os
import time

import pytest
import torch

from scaling_slurm.core.topology.topology import Topology
from tests.support.distributed import RankError, run_ranks


def add_ranks(topology: Topology, offset: int) -> tuple[int, float, int]:
    total = topology.all_reduce(torch.tensor([float(topology.rank + offset)]))
    return topology.rank, total.item(), torch.get_num_threads()


def fail_on_two(topology: Topology) -> None:
    if topology.rank == 2:
        raise ValueError("rank two is broken")
    topology.barrier()


def die_on_one(topology: Topology) -> None:
    if topology.rank == 1:
        os._exit(3)
    topology.barrier()


def hang_on_one(topology: Topology) -> None:
    if topology.rank == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, add_ranks, 10) == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]
    assert run_ranks(1, add_ranks, 10) == [(0, 10.0, 1)]


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 2 of 3 failed.*fail_on_two.*rank two is broken"):
        run_ranks(3, fail_on_two)


def test_a_dead_rank_is_noticed() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nthe process died"):
        run_ranks(2, die_on_one)
    assert time.monotonic() - started < 20


def test_a_hung_rank_is_killed_and_located() -> None:
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] of 2 did not finish.*hang_on_one"):
        run_ranks(2, hang_on_one, timeout=4)
