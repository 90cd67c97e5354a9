import itertools

import pytest

from scaling_slurm.core.config import TopologyConfig, TrainerConfig
from scaling_slurm.core.topology.layout import BatchArithmetic, Layout, derive_batch, derive_layout
from scaling_slurm.errors import ConfigError


def test_ranks_are_numbered_pipeline_data_tensor() -> None:
    layout = Layout(tensor=2, pipeline=3, data=4)
    assert layout.world_size == 24
    in_order = list(itertools.product(range(3), range(4), range(2)))
    assert [layout.coordinates(rank) for rank in range(24)] == in_order
    assert [layout.rank(*coordinates) for coordinates in in_order] == list(range(24))


def test_a_rank_outside_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        Layout(data=2).coordinates(2)


def config(tensor: int, pipeline: int, data: int | None) -> TopologyConfig:
    return TopologyConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "world", "derived"),
    [(1, 1, None, 1, 1), (1, 1, None, 8, 8), (2, 2, None, 8, 2), (4, 2, 3, 24, 3), (8, 1, None, 8, 1)],
)
def test_the_data_size_is_derived(tensor: int, pipeline: int, data: int | None, world: int, derived: int) -> None:
    assert derive_layout(config(tensor, pipeline, data), world) == Layout(tensor, pipeline, derived)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "world", "factors"),
    [
        (2, 1, None, 3, r"tensor_parallel_size 2 x pipeline_parallel_size 1 = 2 does not divide the world size 3"),
        (2, 2, None, 2, r"= 4 does not divide the world size 2"),
        (2, 2, 2, 4, r"2 x pipeline_parallel_size 2 x data_parallel_size 2 = 8, but the world size is 4"),
        (1, 1, 2, 1, r"= 2, but the world size is 1"),
    ],
)
def test_a_product_that_does_not_fit(tensor: int, pipeline: int, data: int | None, world: int, factors: str) -> None:
    with pytest.raises(ConfigError, match=factors) as error:
        derive_layout(config(tensor, pipeline, data), world)
    assert "topology in the run file" in str(error.value)


def test_accumulation_is_derived_from_the_global_batch() -> None:
    trainer = TrainerConfig(num_steps=1, global_batch_size=48, micro_batch_size=2)
    assert derive_batch(trainer, Layout(data=4, tensor=2)) == BatchArithmetic(48, 2, 6)
    assert derive_batch(trainer, Layout()) == BatchArithmetic(48, 2, 24)


def test_a_batch_that_cannot_be_cut_evenly() -> None:
    trainer = TrainerConfig(num_steps=1, global_batch_size=48, micro_batch_size=5)
    with pytest.raises(ConfigError, match=r"48 is not divisible by micro_batch_size 5 x data_parallel_size 2 = 10"):
        derive_batch(trainer, Layout(data=2))
