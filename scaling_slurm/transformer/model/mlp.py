"""The SwiGLU feed-forward (https://arxiv.org/abs/2002.05202). Knows neither norm nor residual."""

import torch.nn.functional as F
from torch import Tensor, nn

from scaling_slurm.core.parameter import Normal
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from scaling_slurm.transformer.config import ModelConfig


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `output_init` is for the matrix that writes into the residual."""

    def __init__(self, config: ModelConfig, output_init: Normal) -> None:
        super().__init__()
        hidden, intermediate, init = config.hidden_size, config.intermediate_size, Normal(config.init_std)
        self.gate = ColumnParallelLinear(hidden, intermediate, bias=False, init=init)
        self.up = ColumnParallelLinear(hidden, intermediate, bias=False, init=init)
        self.down = RowParallelLinear(intermediate, hidden, bias=False, init=output_init)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate(x)) * self.up(x)  # [batch, seq, intermediate]
        output: Tensor = self.down(gated)  # [batch, seq, hidden]
        return output
