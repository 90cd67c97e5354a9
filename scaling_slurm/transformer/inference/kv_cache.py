"""Keys and values of the tokens already seen, in memory that is allocated once. Knows no model."""

import torch
from torch import Tensor

from scaling_slurm.transformer.config import ModelConfig


class LayerCache:
    """One layer's part: [batch, key-value heads, max_length, head_size] of each, filled up to `length`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take up [batch, key-value heads, seq, head_size] of each; returns views of all that is held now."""
        start, count = self.length, keys.shape[2]
        end = start + count
        assert end <= self.keys.shape[2], f"{end} tokens in a cache of {self.keys.shape[2]}"
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)
        self.length = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class KVCache:
    """The cache of a whole model for `batch` sequences of equal length; `dtype` is that of the model's activations."""

    def __init__(
        self, config: ModelConfig, *, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (2, config.num_layers, batch, config.key_value_heads, max_length, config.head_size)
        keys, values = torch.empty(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.layers = [LayerCache(keys[layer], values[layer]) for layer in range(config.num_layers)]

    @property
    def is_full(self) -> bool:
        """Whether another token finds no room."""
        return self.layers[0].length >= self.max_length
