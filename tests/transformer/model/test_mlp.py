import torch

from scaling_slurm.core.parameter import Normal, declared_spec
from scaling_slurm.transformer.model.mlp import MLP
from tests.support.language_model import bound_model, small_config


def test_formula() -> None:
    mlp = bound_model(small_config()).get_submodule("layers.0.mlp")
    assert isinstance(mlp, MLP)
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = x @ mlp.gate.weight.t(), x @ mlp.up.weight.t()
    expected = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down.weight.t()
    assert torch.allclose(mlp(x), expected, rtol=0, atol=1e-12)


def test_only_the_matrix_that_writes_into_the_residual_starts_smaller() -> None:
    mlp = MLP(small_config(init_std=0.3), output_init=Normal(0.1))
    inits = {name: declared_spec(getattr(mlp, name), "weight").init for name in ("gate", "up", "down")}
    assert inits == {"gate": Normal(0.3), "up": Normal(0.3), "down": Normal(0.1)}
