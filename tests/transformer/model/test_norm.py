import pytest
import torch

from scaling_slurm.transformer.model.norm import RMSNorm
from tests.support.language_model import small_config


def norm_of(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(small_config(hidden_size=256, norm_epsilon=1e-3)).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    return norm


def test_formula() -> None:
    norm = norm_of(torch.float64)
    x = 0.05 * torch.randn(4, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert torch.allclose(norm(x), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_bfloat16_is_computed_in_float32(scale: float) -> None:
    """The mean of 256 squares in bfloat16 would be off by per cents."""
    norm = norm_of(torch.bfloat16)
    x = (scale * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = norm_of(torch.bfloat16).double()(x.double())
    result = norm(x)
    assert result.dtype == torch.bfloat16
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01).all()
