"""The untied output layer. It leaves its product undone: the loss takes it in chunks, generation wants the last token.

Knows neither targets nor sampling.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from scaling_slurm.core.parameter import Normal
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear
from scaling_slurm.transformer.batch import Activation
from scaling_slurm.transformer.config import ModelConfig


class Prediction(NamedTuple):
    """What the model gives: the loss takes it in chunks, `logits` whole."""

    hidden: Tensor
    """[batch, seq, hidden]"""
    head: Head

    def logits(self) -> Tensor:
        """[batch, seq, vocab]"""
        return self.head.project(self.hidden)

    def last(self) -> Prediction:
        """Of the last token only."""
        return self._replace(hidden=self.hidden[:, -1:])


class Head(ColumnParallelLinear):
    """Activation -> Prediction."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False, init=Normal(config.init_std))

    def forward(self, activation: Activation) -> Prediction:  # type: ignore[override]  # a layer, not a part of one
        return Prediction(activation.hidden, self)

    def project(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> logits, [..., vocab]"""
        return super().forward(hidden)
