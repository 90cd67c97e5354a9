"""Causal grouped-query self-attention (https://arxiv.org/abs/2305.13245). Knows neither norm nor residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.parameter import Normal
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.model.rotary import Rotary

if TYPE_CHECKING:
    from scaling_slurm.transformer.inference.kv_cache import LayerCache


class Attention(nn.Module):
    """Every token attends to itself and to those before it.

    Without dropout the fused kernel of `scaled_dot_product_attention` is used; dropout of the probabilities needs the
    matrix of all of them, [batch, heads, seq, seq]. `output_init` is for the matrix that writes into the residual.
    """

    def __init__(self, config: ModelConfig, output_init: Normal) -> None:
        super().__init__()
        self.head_size = config.head_size
        hidden, init = config.hidden_size, Normal(config.init_std)
        key_value_size = config.key_value_heads * config.head_size
        self.query = ColumnParallelLinear(hidden, hidden, bias=False, init=init)
        self.key = ColumnParallelLinear(hidden, key_value_size, bias=False, init=init)
        self.value = ColumnParallelLinear(hidden, key_value_size, bias=False, init=init)
        self.output = RowParallelLinear(hidden, hidden, bias=False, init=output_init)
        self.rotary = Rotary(config)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[batch, seq, hidden] -> the same shape. A cache holds the tokens before these, and takes these up."""
        start = cache.length if cache else 0
        query = self._heads(self.query(x))  # [batch, heads, seq, head_size]
        key, value = self._heads(self.key(x)), self._heads(self.value(x))  # [batch, key-value heads, seq, head_size]
        query, key = self.rotary(query, key, start)
        if cache:
            key, value = cache.append(key, value)  # [batch, key-value heads, start + seq, head_size]
        if self.training and self.dropout.probability:
            mixed = self._unfused(query, key, value, positions)
        else:
            mixed = _fused(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # [batch, seq, hidden]
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * head_size] -> [batch, heads, seq, head_size]"""
        batch, seq, _ = x.shape
        return x.view(batch, seq, -1, self.head_size).transpose(1, 2)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ key.transpose(-1, -2) * self.head_size**-0.5  # [batch, heads, seq, seq]
        scores = scores.masked_fill(~_causal_mask(query, key), float("-inf"))
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        kept: Tensor = self.dropout(probabilities, positions)
        return kept @ value


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without dropout; the queries are the last of the keys' tokens."""
    seq, total = query.shape[-2], key.shape[-2]
    mask = _causal_mask(query, key) if 1 < seq < total else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=1 < seq == total, enable_gqa=query.shape[1] != key.shape[1]
    )


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Which key each query may see, [seq, total] bool; the last query stands at the last key."""
    seq, total = query.shape[-2], key.shape[-2]
    return torch.ones(seq, total, dtype=torch.bool, device=query.device).tril(total - seq)
