"""Dropout whose mask is a hash of run, place in the model, sample and element. Knows no ranks and keeps no state."""

import torch
from torch import nn

from scaling_slurm.core.topology.random import keep_mask


class Dropout(nn.Module):
    """Zeroes elements with a probability and scales the others up (https://arxiv.org/abs/1207.0580).

    The mask of a sample follows its position in the training order, however the samples are grouped or recomputed.
    ParallelModule.bind gives each Dropout its own key; used alone, all have the key 0.
    """

    key: torch.Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        assert 0.0 <= probability < 1.0, probability
        self.probability = probability
        # A tensor, since torch.compile would compile anew for each value of an integer.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def reset_buffers(self) -> None:
        self.key.zero_()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [batch, ...]; positions: [batch] int64. The identity in evaluation and for probability 0."""
        if not self.training or self.probability == 0.0:
            return x
        keep_probability = 1.0 - self.probability
        mask = keep_mask(self.key, positions, x.shape[1:], keep_probability)
        return x * mask * (1.0 / keep_probability)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"
