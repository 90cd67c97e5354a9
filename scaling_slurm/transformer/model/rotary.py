"""Rotary positions (https://arxiv.org/abs/2104.09864), where dim i is paired with dim i + head_size / 2, as in Llama.

The tables follow from the settings alone, so they are in no checkpoint. Knows no attention.
"""

import torch
from torch import Tensor, nn

from scaling_slurm.transformer.config import ModelConfig


class Rotary(nn.Module):
    """Turns queries and keys by their position.

    Whatever the dtype of the weights, angles are computed in float64, tables are float32, the rotation is in float32 or
    higher, and its result is rounded once. So compiled and eager code agree, and far positions are exact too.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size, self.length, self.base = config.head_size, config.sequence_length, config.rotary_base
        for name in ("cosine", "sine"):
            empty = torch.empty(self.length, self.head_size, dtype=torch.float32)
            self.register_buffer(name, empty, persistent=False)

    def reset_buffers(self) -> None:
        """Compute the tables, [sequence_length, head_size]."""
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(self.length, dtype=torch.float64), self.base ** (-pairs / self.head_size))
        self.cosine.copy_(torch.cat((angles.cos(), angles.cos()), dim=-1))
        # The sign in (x1 cos - x2 sin, x2 cos + x1 sin) sits in the table.
        self.sine.copy_(torch.cat((-angles.sin(), angles.sin()), dim=-1))

    def forward(self, query: Tensor, key: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Rotate both, [batch, their heads, seq, head_size]; their first token stands at position `start`."""
        end = start + query.shape[2]
        cosine, sine = self.cosine[start:end], self.sine[start:end]
        return self._rotate(query, cosine, sine), self._rotate(key, cosine, sine)

    def _rotate(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        swapped = x.roll(self.head_size // 2, dims=-1)
        return torch.addcmul(x * cosine, swapped, sine).to(x.dtype)
