import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaling_slurm.core.parameter import Normal, declared_spec
from scaling_slurm.transformer.batch import Activation
from scaling_slurm.transformer.inference.kv_cache import KVCache
from scaling_slurm.transformer.model.block import Block
from tests.support.language_model import bound_model, small_config


def normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions as a complex product, [..., seq, head_size]."""
    half = x.shape[-1] // 2
    steps = torch.outer(torch.arange(x.shape[-2]).double(), base ** -(torch.arange(half).double() / half))
    product = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(steps), steps)
    return torch.cat((product.real, product.imag), -1)


def test_formula() -> None:
    config = small_config(norm_epsilon=1e-3)
    block = bound_model(config).get_submodule("layers.1")
    assert isinstance(block, Block)
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for norm in (block.attention_norm, block.mlp_norm):
            norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    weights = {name: parameter.detach() for name, parameter in block.named_parameters()}

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"attention.{name}.weight"].t()).unflatten(-1, (-1, 8)).transpose(1, 2)

    y = normalised(x, weights["attention_norm.weight"], 1e-3)
    query, key = turned(heads(y, "query"), config.rotary_base), turned(heads(y, "key"), config.rotary_base)
    key, value = key.repeat_interleave(2, 1), heads(y, "value").repeat_interleave(2, 1)
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    x1 = x + attended @ weights["attention.output.weight"].t()
    y = normalised(x1, weights["mlp_norm.weight"], 1e-3)
    gated = F.silu(y @ weights["mlp.gate.weight"].t()) * (y @ weights["mlp.up.weight"].t())
    expected = x1 + gated @ weights["mlp.down.weight"].t()
    result = block(Activation(x, torch.arange(2)))
    # The rotary tables are float32.
    assert torch.allclose(result.hidden, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(x1, expected, rtol=0, atol=1e-1), "the MLP adds something"


@torch.no_grad()
def test_each_block_writes_into_its_own_cache() -> None:
    config = small_config()
    block = bound_model(config).eval().get_submodule("layers.1")
    cache = KVCache(config, batch=1, max_length=8, device=torch.device("cpu"), dtype=torch.float64)
    block(Activation(torch.ones(1, 3, 32, dtype=torch.float64), torch.arange(1), cache))
    assert [layer.length for layer in cache.layers] == [0, 3]


@pytest.mark.parametrize(("num_layers", "std"), [(2, 0.15), (8, 0.075)])
def test_what_writes_into_the_residual_starts_smaller_in_deeper_models(num_layers: int, std: float) -> None:
    block = Block(small_config(num_layers=num_layers, init_std=0.3), 0)
    for layer in (block.attention.output, block.mlp.down):
        assert declared_spec(layer, "weight").init == Normal(pytest.approx(std))
    for layer in (block.attention.query, block.attention.key, block.attention.value, block.mlp.gate, block.mlp.up):
        assert declared_spec(layer, "weight").init == Normal(0.3)
