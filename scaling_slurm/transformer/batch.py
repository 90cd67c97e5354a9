"""What travels through the model: the inputs of its first layer, and the activation that goes from layer to layer.

Knows no file formats and no loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from scaling_slurm.transformer.inference.kv_cache import KVCache


class Inputs(NamedTuple):
    """What the first layer takes."""

    tokens: Tensor
    """Ids, [batch, seq] int64."""
    positions: Tensor
    """Place of each sample in the order of training, [batch] int64: keys dropout, and nothing else."""
    cache: KVCache | None = None
    """Keys and values of the tokens before these; only while generating."""


class Activation(NamedTuple):
    """What goes from layer to layer."""

    hidden: Tensor
    """[batch, seq, hidden]"""
    positions: Tensor
    cache: KVCache | None = None
