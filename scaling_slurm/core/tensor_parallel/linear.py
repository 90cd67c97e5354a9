"""Linear layers that say along which dimension tensor parallel ranks share them. Used alone they are nn.Linear."""

import math
from typing import Any

from torch import nn

from scaling_slurm.core.parameter import Constant, Init, ParameterSpec, Uniform, declare


class ColumnParallelLinear(nn.Linear):
    """Splits its output features over tensor parallel ranks (https://arxiv.org/abs/1909.08053).

    `init` is what ParallelModule.bind gives the weight; the bias is then zero. By default both are uniform within
    1 / sqrt(in_features), the distribution of nn.Linear.
    """

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
        _declare(self, init, weight_dim=0, bias_dim=0)


class RowParallelLinear(nn.Linear):
    """Splits its input features over tensor parallel ranks and adds up their products; every rank has the whole bias.

    `init` as for ColumnParallelLinear.
    """

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
        _declare(self, init, weight_dim=1, bias_dim=None)


def _declare(linear: nn.Linear, init: Init | None, *, weight_dim: int, bias_dim: int | None) -> None:
    default = Uniform(1.0 / math.sqrt(linear.in_features))
    declare(linear, "weight", ParameterSpec(sharded_dim=weight_dim, init=init or default))
    if linear.bias is not None:
        declare(linear, "bias", ParameterSpec(sharded_dim=bias_dim, init=Constant(0.0) if init else default))
