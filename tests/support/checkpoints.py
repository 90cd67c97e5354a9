"""Small states to save, and a save of them in one line. Knows no model: values are a function of name and step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.writer import CheckpointWriter, SaveReport
from scaling_slurm.core.parameter import ParameterInfo
from scaling_slurm.core.topology.topology import Topology

KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {f"layers.{layer}.{name}": shape for layer in range(4) for name, shape in {"w": (7, 5), "b": (3,)}.items()}


def make_tensors(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """ "kind/name" -> tensor; another step has other values everywhere."""
    tensors = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        for number, kind in enumerate(KINDS):
            generator = torch.Generator().manual_seed(1000 * step + 10 * index + number)
            tensors[f"{kind}/{name}"] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return tensors


def infos_of(tensors: Mapping[str, Tensor]) -> list[ParameterInfo]:
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    return [ParameterInfo(name, value.shape, None, nn.Parameter(value)) for name, value in weights.items()]


def save(
    path: Path,
    step: int,
    *,
    attempt: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
    infos: Sequence[ParameterInfo] | None = None,
    topology: Topology | None = None,
    is_current: Callable[[], bool] = lambda: True,
    state: dict[str, Any] | None = None,
) -> SaveReport:
    tensors = make_tensors(step) if tensors is None else tensors
    writer = CheckpointWriter(CheckpointDirectory(path), topology or Topology(), attempt=attempt, is_current=is_current)
    return writer.save(
        step,
        tensors,
        infos_of(tensors) if infos is None else infos,
        state={"consumed_samples": 8 * step} if state is None else state,
        config={"trainer": {"num_steps": 100}},
        data_fingerprint="fingerprint",
    )


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def files_of(checkpoint: Checkpoint) -> list[str]:
    return sorted(entry.name for entry in checkpoint.path.iterdir())
