"""Arithmetic of ranks and batches, without torch: the login node plans with it.

Ranks are `arange(world_size).reshape(pipeline, data, tensor)`: tensor neighbours sit next to each other, on one node.
"""

from dataclasses import dataclass

from scaling_slurm.core.config import TopologyConfig, TrainerConfig
from scaling_slurm.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) index of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """Global rank at a coordinate."""
        return (pipeline * self.data + data) * self.tensor + tensor


def derive_layout(config: TopologyConfig, world_size: int) -> Layout:
    """The layout of `world_size` ranks; raises ConfigError with all factors when they do not multiply to it."""
    tensor, pipeline, data = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    factors = f"tensor_parallel_size {tensor} x pipeline_parallel_size {pipeline}"
    if data is None:
        if world_size % (tensor * pipeline):
            raise ConfigError(
                f"{factors} = {tensor * pipeline} does not divide the world size {world_size}",
                "the product must divide nodes x tasks per node",
                "topology in the run file, or --nodes",
            )
        data = world_size // (tensor * pipeline)
    if tensor * pipeline * data != world_size:
        raise ConfigError(
            f"{factors} x data_parallel_size {data} = {tensor * pipeline * data}, but the world size is {world_size}",
            "leave data_parallel_size out to derive it",
            "topology in the run file, or --nodes",
        )
    return Layout(tensor=tensor, pipeline=pipeline, data=data)


@dataclass(frozen=True)
class BatchArithmetic:
    """How a global batch of sequences is cut: global = micro x accumulation x data."""

    global_batch_size: int
    micro_batch_size: int
    accumulation: int


def derive_batch(config: TrainerConfig, layout: Layout) -> BatchArithmetic:
    """Accumulation steps for a layout; raises ConfigError when the batch cannot be cut evenly."""
    share = config.micro_batch_size * layout.data
    if config.global_batch_size % share:
        above = -(-config.global_batch_size // share) * share
        micros = [
            size
            for size in range(config.micro_batch_size, 0, -1)
            if config.global_batch_size % (size * layout.data) == 0
        ]
        smaller = f" or micro_batch_size {micros[0]}" if micros else ""
        raise ConfigError(
            f"global_batch_size {config.global_batch_size} is not divisible by "
            f"micro_batch_size {config.micro_batch_size} x data_parallel_size {layout.data} = {share}",
            f"global_batch_size {above}{smaller} would do",
            "trainer.global_batch_size or trainer.micro_batch_size",
        )
    return BatchArithmetic(config.global_batch_size, config.micro_batch_size, config.global_batch_size // share)
