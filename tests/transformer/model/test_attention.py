import pytest
import torch
from torch import Tensor

from scaling_slurm.transformer.model.attention import Attention, _fused
from tests.support.language_model import bound_model, small_config


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query after the other, by the definition; the last query stands at the last key."""
    group, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    result = torch.empty_like(query)
    for sample, head, place in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])):
        seen_keys = key[sample, head // group, : before + place + 1]
        seen_values = value[sample, head // group, : before + place + 1]
        weights = torch.softmax(seen_keys @ query[sample, head, place] / query.shape[-1] ** 0.5, 0)
        result[sample, head, place] = weights @ seen_values
    return result


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize(("seq", "total"), [(6, 6), (1, 6), (3, 6), (1, 1)])
def test_fused_equals_the_definition(key_value_heads: int, seq: int, total: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, seq, 8, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, key_value_heads, total, 8, dtype=torch.float64, generator=generator)
    assert torch.allclose(_fused(query, key, value), explicit(query, key, value), rtol=0, atol=1e-13)


def test_unfused_path_without_loss_of_probabilities_equals_the_fused_one() -> None:
    attention = next(m for m in bound_model(small_config()).modules() if isinstance(m, Attention))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 9, 8, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64, generator=generator)
    unfused = attention._unfused(query, key, value, torch.arange(2))
    assert torch.allclose(unfused, _fused(query, key, value), rtol=0, atol=1e-13)
