import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.parameter import Constant, Normal, ParameterSpec, Uniform, declare
from scaling_slurm.core.pipeline.parallel_module import LayerSpec, ParallelModule
from scaling_slurm.core.tensor_parallel.embedding import VocabParallelEmbedding
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from scaling_slurm.core.topology.random import key, normal, signed
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import ConfigError
from tests.support.distributed import run_ranks


class Block(nn.Module):
    """One parameter of every kind of origin, and computed buffers."""

    table: torch.Tensor
    indices: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, 2 * width, init=Normal(0.02))
        self.down = RowParallelLinear(2 * width, width)
        self.plain = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.empty(width))
        declare(self, "gain", ParameterSpec(init=Constant(3.0)))
        self.dropout = Dropout(0.1)
        self.register_buffer("table", torch.empty(width, dtype=torch.float64), persistent=False)
        self.register_buffer("indices", torch.empty(width, dtype=torch.int64))

    def reset_buffers(self) -> None:
        self.table.copy_(torch.linspace(0, 1, len(self.table), dtype=torch.float64))
        self.indices = torch.arange(len(self.indices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.plain(self.norm(x)))) * self.gain  # type: ignore[no-any-return]


def build(width: int = 8) -> ParallelModule:
    layers = [LayerSpec("embedding", lambda: VocabParallelEmbedding(11, width))]
    layers += [LayerSpec(f"layers.{index}", lambda: Block(width)) for index in range(2)]
    return ParallelModule([*layers, LayerSpec("head", lambda: ColumnParallelLinear(width, 11, bias=False))])


def weights(topology: Topology, seed: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    model = build().bind(topology, seed=seed, dtype=dtype)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_layers_cost_no_memory_before_bind_and_know_their_names() -> None:
    model = build()
    infos = model.parameter_infos()
    assert all(info.parameter.is_meta for info in infos)
    assert [info.name for info in infos][:4] == [
        "embedding.weight",
        "layers.0.gain",
        "layers.0.up.weight",
        "layers.0.up.bias",
    ]
    assert {info.name: info.sharded_dim for info in infos} == {
        "embedding.weight": 0,
        **{
            f"layers.{index}.{name}": dim
            for index in range(2)
            for name, dim in {
                "gain": None,
                "up.weight": 0,
                "up.bias": 0,
                "down.weight": 1,
                "down.bias": None,
                "plain.weight": None,
                "plain.bias": None,
                "norm.weight": None,
                "norm.bias": None,
            }.items()
        },
        "head.weight": 0,
    }
    block = 8 * 16 + 16 + 16 * 8 + 8 + 8 * 8 + 8 + 8 + 8 + 8
    assert model.num_parameters == 11 * 8 + 2 * block + 11 * 8
    assert infos[0].shape == (11, 8)


def test_forward_is_the_layers_in_order() -> None:
    model = build().bind(Topology(), seed=1, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3]])
    x = nn.functional.embedding(ids, model.get_parameter("embedding.weight"))
    for index in range(2):
        x = model.get_submodule(f"layers.{index}")(x)
    assert torch.equal(model(ids), x @ model.get_parameter("head.weight").t())
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())


def test_layers_are_registered_once_and_copied_with_the_model() -> None:
    model = build().bind(Topology(), seed=1, dtype=torch.float64)
    names = list(model.state_dict())
    assert len(names) == len(set(names)) == len(model.parameter_infos()) + 2, "and one saved buffer in each block"
    twin, ids = copy.deepcopy(model), torch.tensor([[1, 2, 3]])
    expected = model(ids)
    with torch.no_grad():
        model.get_parameter("head.weight").zero_()
    assert torch.equal(twin(ids), expected)
    assert not model(ids).any()


def test_declared_values_are_hashed_by_logical_name_and_element() -> None:
    state = weights(Topology())
    expected = normal(key("initial", 7, "layers.1.up.weight"), (16, 8), std=0.02)
    assert np.array_equal(state["layers.1.up.weight"], expected.numpy())
    assert not state["layers.1.up.bias"].any()
    assert np.array_equal(state["layers.0.gain"], np.full(8, 3.0, np.float32))
    assert not np.array_equal(state["layers.0.up.weight"], state["layers.1.up.weight"])
    assert state["embedding.weight"].std() == pytest.approx(1.0, abs=0.25)
    bound = 1 / math.sqrt(16)
    assert 0.8 * bound < abs(state["layers.0.down.weight"]).max() <= bound
    assert 0 < abs(state["layers.0.down.bias"]).max() <= bound


def test_plain_layers_get_the_values_of_their_own_constructor() -> None:
    state = weights(Topology())
    torch.manual_seed(key("initial", 7, "layers.1.plain"))
    plain = nn.Linear(8, 8)
    assert np.array_equal(state["layers.1.plain.weight"], plain.weight.detach().numpy())
    assert np.array_equal(state["layers.1.plain.bias"], plain.bias.detach().numpy())
    assert np.array_equal(state["layers.1.norm.weight"], np.ones(8, np.float32))


def test_float32_values_are_the_rounded_float64_ones_where_declared() -> None:
    single, double = weights(Topology()), weights(Topology(), dtype=torch.float64)
    for name in ("embedding.weight", "layers.0.up.weight", "layers.0.down.weight", "head.weight"):
        assert np.array_equal(single[name], double[name].astype(np.float32))


def test_buffers_are_computed_and_keep_their_dtype() -> None:
    model = build().bind(Topology(), seed=7, dtype=torch.bfloat16)
    block = model.get_submodule("layers.0")
    assert torch.equal(block.get_buffer("table"), torch.linspace(0, 1, 8, dtype=torch.float64))
    assert torch.equal(block.get_buffer("indices"), torch.arange(8))
    assert block.get_buffer("dropout.key").item() == signed(key("dropout", 7, "layers.0.dropout"))
    assert model.get_buffer("layers.1.dropout.key").item() != block.get_buffer("dropout.key").item()
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    first = weights(Topology())
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    second = weights(Topology())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    other = weights(Topology(), seed=8)
    random_names = [name for name in first if np.unique(first[name]).size > 1 and "indices" not in name]
    assert len(random_names) == 1 + 2 * 5 + 1
    assert not any(np.array_equal(first[name], other[name]) for name in random_names)


def test_values_are_the_same_whatever_the_world_size() -> None:
    alone = weights(Topology())
    for rank_state in run_ranks(3, weights):
        assert rank_state.keys() == alone.keys()
        assert all(np.array_equal(rank_state[name], alone[name]) for name in alone)


def test_shared_parameters_stay_shared() -> None:
    embedding = VocabParallelEmbedding(11, 8, init=Normal(0.1)).to("meta")

    def build_head() -> nn.Module:
        head = ColumnParallelLinear(8, 11, bias=False)
        head.weight = embedding.weight
        return head

    model = ParallelModule([LayerSpec("embedding", lambda: embedding), LayerSpec("head", build_head)])
    model.bind(Topology(), seed=0, dtype=torch.float32)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert [info.name for info in model.parameter_infos()] == ["embedding.weight"]
    expected = normal(key("initial", 0, "embedding.weight"), (11, 8), std=0.1)
    assert torch.equal(model.get_parameter("head.weight"), expected)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class Outer(nn.Module):
    """Initialises its child, as a constructor would, after the child's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.inner.bias, 5.0)
        nn.init.zeros_(self.frozen)


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3).to(dtype))


def bind(layer: type[nn.Module] | nn.Module) -> ParallelModule:
    build_layer = layer if isinstance(layer, type) else lambda: layer
    return ParallelModule([LayerSpec("a.b", build_layer)]).bind(Topology(), seed=0, dtype=torch.float32)


def test_a_parent_initialises_after_its_children() -> None:
    model = bind(Outer)
    assert torch.equal(model.get_parameter("a.b.inner.bias"), torch.full((3,), 5.0))
    assert model.get_parameter("a.b.inner.weight").std().item() > 0.1
    assert not model.get_parameter("a.b.frozen").requires_grad


def test_a_parameter_that_nothing_sets_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a\.b\.factor has no initial value; .*reset_parameters"):
        bind(Scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_buffer_that_nothing_computes_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"a\.b\.table has no initial value; .*reset_buffers"):
        bind(Table(dtype))


@pytest.mark.parametrize("names", [("a", "a"), ("layers", "layers.0"), ("layers.0", "layers")])
def test_names_that_clash_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{names[0]!r} and {names[1]!r} share a name"):
        ParallelModule([LayerSpec(name, nn.Identity) for name in names])


def test_batch_norm_and_uniform_declarations() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.shift = nn.Parameter(torch.empty(1000))
            declare(self, "shift", ParameterSpec(init=Uniform(0.5)))

    model = bind(Mixed)
    assert torch.equal(model.get_buffer("a.b.norm.running_var"), torch.ones(4))
    assert model.get_buffer("a.b.norm.num_batches_tracked").item() == 0
    shift = model.get_parameter("a.b.shift")
    assert -0.5 <= shift.min().item() < -0.45
    assert 0.45 < shift.max().item() <= 0.5
