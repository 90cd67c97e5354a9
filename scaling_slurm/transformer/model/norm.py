"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467). Knows nothing of where it stands in a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling_slurm.core.parameter import Constant, ParameterSpec, declare
from scaling_slurm.transformer.batch import Activation
from scaling_slurm.transformer.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim; computed in float32 or higher, in x's dtype after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        declare(self, "weight", ParameterSpec(init=Constant(1.0)))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class FinalNorm(RMSNorm):
    """The same, as a layer of its own behind the last block."""

    def forward(self, activation: Activation) -> Activation:  # type: ignore[override]  # a layer, not a part of one
        return activation._replace(hidden=super().forward(activation.hidden))
