"""One decoder block: norm, attention, residual, norm, MLP, residual. Knows its own number, and no other block."""

import math

from torch import nn

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.parameter import Normal
from scaling_slurm.transformer.batch import Activation
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.model.attention import Attention
from scaling_slurm.transformer.model.mlp import MLP
from scaling_slurm.transformer.model.norm import RMSNorm


class Block(nn.Module):
    """Pre-norm: what attention and MLP compute from the normalised stream is added to it."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        # Two matrices a block write into the residual: its variance at the end does not grow with the depth.
        output_init = Normal(config.init_std / math.sqrt(2 * config.num_layers))
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, output_init)
        self.attention_dropout = Dropout(config.residual_dropout)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, output_init)
        self.mlp_dropout = Dropout(config.residual_dropout)

    def forward(self, activation: Activation) -> Activation:
        hidden, positions, cache = activation
        layer_cache = cache.layers[self.index] if cache else None
        attended = self.attention(self.attention_norm(hidden), positions, layer_cache)
        hidden = hidden + self.attention_dropout(attended, positions)
        hidden = hidden + self.mlp_dropout(self.mlp(self.mlp_norm(hidden)), positions)
        return Activation(hidden, positions, cache)
