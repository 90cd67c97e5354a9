"""Linear layers that say along which dimension tensor parallel ranks share them. Used alone they are nn.Linear."""

import math
from typing import Any, ClassVar

from torch import nn

from scaling_slurm.core.parameter import Constant, Init, ParameterSpec, Uniform, declare


class _ParallelLinear(nn.Linear):
    """Declares how its parameters are sharded and start."""

    weight_dim: ClassVar[int]
    bias_dim: ClassVar[int | None]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Init | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        default = Uniform(1.0 / math.sqrt(in_features))
        declare(self, "weight", ParameterSpec(sharded_dim=self.weight_dim, init=init or default))
        if bias:
            declare(self, "bias", ParameterSpec(sharded_dim=self.bias_dim, init=Constant(0.0) if init else default))


class ColumnParallelLinear(_ParallelLinear):
    """Splits its output features over tensor parallel ranks (https://arxiv.org/abs/1909.08053).

    `init` is what ParallelModule.bind gives the weight; the bias is then zero. By default both are uniform within
    1 / sqrt(in_features), the distribution of nn.Linear.
    """

    weight_dim, bias_dim = 0, 0


class RowParallelLinear(_ParallelLinear):
    """Splits its input features over tensor parallel ranks and adds up their products; every rank has the whole bias.

    `init` as for ColumnParallelLinear.
    """

    weight_dim, bias_dim = 1, None
