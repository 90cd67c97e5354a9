import math
from typing import Any

import pytest
import torch
from torch import nn

from scaling_slurm.core.parameter import Constant, Normal, ParameterSpec, Uniform, declared_spec
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_alone_it_is_exactly_nn_linear(kind: type[nn.Linear], bias: bool) -> None:
    torch.manual_seed(5)
    ours = kind(6, 4, bias)
    torch.manual_seed(5)
    theirs = nn.Linear(6, 4, bias)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(3, 6, requires_grad=True)
    assert torch.equal(ours(x), theirs(x))
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("kind", "weight_dim", "bias_dim"), [(ColumnParallelLinear, 0, 0), (RowParallelLinear, 1, None)]
)
def test_declarations(kind: Any, weight_dim: int, bias_dim: int | None) -> None:
    default = Uniform(1 / math.sqrt(6))
    plain = kind(6, 4, device="meta", dtype=torch.float64)
    assert plain.weight.is_meta
    assert plain.weight.dtype == torch.float64
    assert declared_spec(plain, "weight") == ParameterSpec(weight_dim, default)
    assert declared_spec(plain, "bias") == ParameterSpec(bias_dim, default)
    chosen = kind(6, 4, init=Normal(0.02))
    assert declared_spec(chosen, "weight") == ParameterSpec(weight_dim, Normal(0.02))
    assert declared_spec(chosen, "bias") == ParameterSpec(bias_dim, Constant(0.0))
    assert kind(6, 4, bias=False).bias is None


def test_the_default_is_the_distribution_of_nn_linear() -> None:
    linear = nn.Linear(50, 2000)
    for parameter in (linear.weight, linear.bias):
        assert parameter.abs().max().item() == pytest.approx(1 / math.sqrt(50), rel=2e-3)
