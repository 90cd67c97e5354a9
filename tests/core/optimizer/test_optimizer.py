import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from scaling_slurm.core.config import OptimizerConfig
from scaling_slurm.core.optimizer import optimizer as module
from scaling_slurm.core.optimizer.optimizer import Optimizer
from scaling_slurm.core.parameter import Normal
from scaling_slurm.core.pipeline.parallel_module import LayerSpec, ParallelModule
from scaling_slurm.core.tensor_parallel.linear import ColumnParallelLinear
from scaling_slurm.core.topology.topology import Topology
from tests.support.distributed import run_ranks

CONFIG = OptimizerConfig(weight_decay=0.1, epsilon=1e-8)
RATE = 1e-2
STEPS = 20
State = dict[str, torch.Tensor]


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x))


def build(topology: Topology, dtype: torch.dtype) -> ParallelModule:
    layers = [
        LayerSpec("first", lambda: ColumnParallelLinear(5, 13, init=Normal(0.5))),
        LayerSpec("activation", Activation),
        LayerSpec("second", lambda: ColumnParallelLinear(13, 3)),
    ]
    return ParallelModule(layers).bind(topology, seed=1, dtype=dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), (y * (20 if step % 3 else 0.01)).to(dtype)


def take_step(
    optimizer: Optimizer, topology: Topology, loss_sum: torch.Tensor, tokens: int, clipping: float = 1.0
) -> float:
    """What a trainer does after its backward passes; returns the norm of the mean gradient."""
    packed = torch.stack(
        [optimizer.reduce_gradients(), loss_sum.detach().double(), torch.tensor(float(tokens)).double()]
    )
    squared, _, count = topology.all_reduce(packed)
    norm = squared.sqrt() / count
    clip = (clipping / (norm + 1e-6)).clamp(max=1.0) if clipping else torch.ones(())
    optimizer.step(RATE, count / clip, (~squared.isfinite()).float())
    optimizer.zero_gradients()
    return float(norm)


def train(
    topology: Topology, shares: Sequence[Sequence[int]], dtype: torch.dtype, compute: torch.dtype, steps: int = STEPS
) -> tuple[State, list[float]]:
    """shares: for each rank the sizes of its micro-batches; the rows of a batch are dealt out in this order."""
    model = build(topology, dtype)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, topology, compute)
    start = sum(sum(share) for share in shares[: topology.data_rank])
    norms = []
    for step in range(steps):
        x, y = batch(step, compute)
        total, at = torch.zeros((), dtype=dtype), start
        for size in shares[topology.data_rank]:
            loss = (model(x[at : at + size]) - y[at : at + size]).square().sum().to(dtype)
            loss.backward()
            total, at = total + loss.detach(), at + size
        norms.append(take_step(optimizer, topology, total, at - start))
    return {name: value.clone() for name, value in optimizer.named_state().items()}, norms


def train_with_torch(dtype: torch.dtype, steps: int = STEPS) -> tuple[State, list[float]]:
    """The oracle: the mean loss of the whole batch, torch's plain AdamW and clipping."""
    model = build(Topology(), dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(
        groups, lr=RATE, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.epsilon, foreach=False
    )
    norms = []
    for step in range(steps):
        x, y = batch(step, dtype)
        reference.zero_grad()
        ((model(x) - y).square().sum() / len(x)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        reference.step()
    state: State = {}
    for name, parameter in model.named_parameters():
        state[f"weight/{name}"] = parameter.detach()
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"{kind}/{name}"] = reference.state[parameter][kind]
    return state, norms


def assert_close(actual: State, expected: State, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_it_is_torch_with_the_mean_loss(dtype: torch.dtype, tolerance: float) -> None:
    expected, expected_norms = train_with_torch(dtype)
    state, norms = train(Topology(), [[5, 1, 6]], dtype, dtype)
    assert_close(state, expected, tolerance)
    assert norms == pytest.approx(expected_norms, rel=tolerance)
    assert min(expected_norms) < 1.0 < max(expected_norms)  # clipped and unclipped steps


@pytest.mark.parametrize("shares", [[[1, 4], [7]], [[1], [2, 2], [4], [1, 2]]])
def test_ranks_with_uneven_shares_equal_one_process(shares: list[list[int]]) -> None:
    expected, expected_norms = train(Topology(), [[12]], torch.float64, torch.float64)
    results = run_ranks(len(shares), train, shares, torch.float64, torch.float64)
    for state, norms in results:
        assert_close(state, expected, 1e-9)
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        assert all(torch.equal(state[name], results[0][0][name]) for name in state)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_two_runs_are_equal_to_the_last_bit(compute: torch.dtype) -> None:
    shares = [[3, 2], [3, 4]]
    first, second = (run_ranks(2, train, shares, torch.float32, compute, 5) for _ in range(2))
    assert first[0][1] == second[0][1]
    assert all(torch.equal(first[0][0][name], second[1][0][name]) for name in first[0][0])


def test_autograd_adds_into_the_flat_buffer() -> None:
    model = build(Topology(), torch.float64)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.float64)
    reference = copy.deepcopy(build(Topology(), torch.float64))
    places = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    for step in range(3):
        x, _ = batch(step, torch.float64)
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None] == places
    expected = sum(
        float(parameter.grad.square().sum()) for parameter in reference.parameters() if parameter.grad is not None
    )
    assert optimizer.reduce_gradients().item() == pytest.approx(expected, rel=1e-13)
    optimizer.zero_gradients()
    assert optimizer.reduce_gradients().item() == 0.0
    model.zero_grad()
    with pytest.raises(AssertionError, match=r"weight\.grad was replaced"):
        optimizer.reduce_gradients()


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    model = build(Topology(), torch.float32)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.bfloat16)
    bias = model.get_parameter("second.bias")
    for factor in [256.0] + [0.25] * 64:
        (bias * factor).sum().backward()  # type: ignore[no-untyped-call]
        assert bias.grad is None
    assert optimizer.reduce_gradients().item() == 3 * (256 + 16) ** 2
    assert optimizer.reduce_gradients().dtype == torch.float64


def test_bfloat16_weights_are_copies_of_unrounded_masters() -> None:
    model, exact = build(Topology(), torch.float32), build(Topology(), torch.float32)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.bfloat16)
    state = optimizer.named_state()
    for name, parameter in exact.named_parameters():
        assert torch.equal(state[f"weight/{name}"], parameter)
        assert torch.equal(model.get_parameter(name), parameter.bfloat16())
    for step in range(3):
        x, _ = batch(step, torch.bfloat16)
        loss = model(x).float().square().sum()
        loss.backward()
        take_step(optimizer, Topology(), loss, len(x))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[f"weight/{name}"].bfloat16())
    assert not torch.equal(state["weight/first.weight"], state["weight/first.weight"].bfloat16().float())


def test_weight_decay_is_for_matrices_only() -> None:
    model = build(Topology(), torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.float64)
    optimizer.step(RATE, torch.ones(()), torch.zeros(()))
    for name, parameter in model.named_parameters():
        factor = 1 - RATE * 0.1 if name in ("first.weight", "second.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_a_skipped_step_changes_nothing(dtype: torch.dtype, compute: torch.dtype) -> None:
    model = build(Topology(), dtype)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), compute)
    twin_model = build(Topology(), dtype)
    twin = Optimizer(twin_model.parameter_infos(), CONFIG, Topology(), compute)

    def advance(a_model: ParallelModule, an_optimizer: Optimizer, step: int, poison: bool = False) -> None:
        x, _ = batch(step, compute)
        loss = a_model(x).square().sum().to(dtype)
        (loss * (float("nan") if poison else 1.0)).backward()
        take_step(an_optimizer, Topology(), loss, len(x))

    advance(model, optimizer, 0)
    advance(twin_model, twin, 0)
    before = {name: value.clone() for name, value in optimizer.named_state().items()}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    advance(model, optimizer, 1, poison=True)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.named_state().items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert optimizer.state_scalars() == {"num_steps": 1}
    for step in (2, 3):  # the bias correction and the moments go on as if there had been no step
        advance(model, optimizer, step)
        advance(twin_model, twin, step)
    twin_state = twin.named_state()
    assert all(torch.equal(value, twin_state[name]) for name, value in optimizer.named_state().items())
    assert optimizer.state_scalars() == {"num_steps": 3}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_round_trip_through_the_state_continues_to_the_last_bit(compute: torch.dtype) -> None:
    def advance(model: ParallelModule, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            x, _ = batch(step, compute)
            loss = model(x).float().square().sum()
            loss.backward()
            take_step(optimizer, Topology(), loss, len(x))

    model = build(Topology(), torch.float32)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), compute)
    advance(model, optimizer, range(5))
    saved = {name: value.clone() for name, value in optimizer.named_state().items()}
    scalars = optimizer.state_scalars()
    advance(model, optimizer, range(5, 10))

    other = build(Topology(), torch.float32)
    restored = Optimizer(other.parameter_infos(), CONFIG, Topology(), compute)
    for name, value in restored.named_state().items():
        value.copy_(saved[name])
    restored.load_state_scalars(scalars)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, saved[f"weight/{name}"].to(compute))
    advance(other, restored, range(5, 10))
    expected = optimizer.named_state()
    assert all(torch.equal(value, expected[name]) for name, value in restored.named_state().items())
    assert restored.state_scalars() == optimizer.state_scalars() == {"num_steps": 10}


def test_the_state_has_logical_names_and_full_shapes() -> None:
    model = build(Topology(), torch.float32)
    state = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.bfloat16).named_state()
    names = [info.name for info in model.parameter_infos()]
    assert set(state) == {f"{kind}/{name}" for kind in ("weight", "exp_avg", "exp_avg_sq") for name in names}
    assert state["exp_avg_sq/first.weight"].shape == (13, 5)
    assert all(value.dtype == torch.float32 for value in state.values())


def test_frozen_parameters_stay_and_empty_groups_do_no_harm() -> None:
    model = build(Topology(), torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    before = model.get_parameter("first.weight").detach().clone()
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.bfloat16)
    x, _ = batch(0, torch.bfloat16)
    loss = model(x).float().square().sum()
    loss.backward()
    take_step(optimizer, Topology(), loss, len(x))
    assert torch.equal(model.get_parameter("first.weight"), before.bfloat16())
    assert "exp_avg/first.weight" not in optimizer.named_state()
    assert torch.equal(optimizer.named_state()["weight/first.weight"], before.bfloat16())
    assert Optimizer([], CONFIG, Topology(), torch.float32).state_scalars() == {"num_steps": 0}
    assert Optimizer([], CONFIG, Topology(), torch.float32).reduce_gradients().item() == 0.0


def uneven_gradients(topology: Topology) -> tuple[float, float]:
    """Rank 1 has no backward pass at all; the shares add up to the norm of the sum."""
    model = build(topology, torch.float64)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, topology, torch.float64)
    if topology.rank == 0:
        model(batch(0, torch.float64)[0]).square().sum().backward()
    own = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    return own, float(topology.all_reduce(optimizer.reduce_gradients()))


def test_a_rank_without_gradients_adds_nothing() -> None:
    (own, total), (nothing, total_there) = run_ranks(2, uneven_gradients)
    assert nothing == 0.0
    assert total == total_there == pytest.approx(own, rel=1e-13)


def test_norms_of_long_buffers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million float32 squares, in chunks; float32 sums would be off in the sixth digit."""
    monkeypatch.setattr(module, "NORM_CHUNK", 1 << 16)
    model = ParallelModule([LayerSpec("wide", lambda: ColumnParallelLinear(1000, 500, bias=False))])
    model.bind(Topology(), seed=0, dtype=torch.float32)
    optimizer = Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.float32)
    (model.get_parameter("wide.weight") * 0.1).sum().backward()  # type: ignore[no-untyped-call]
    expected = 500_000 * float(torch.tensor(0.1)) ** 2
    assert math.isclose(optimizer.reduce_gradients().item(), expected, rel_tol=1e-12)


def test_masters_in_a_short_dtype_are_refused() -> None:
    model = build(Topology(), torch.bfloat16)
    with pytest.raises(AssertionError, match=r"master weights cannot be torch\.bfloat16"):
        Optimizer(model.parameter_infos(), CONFIG, Topology(), torch.bfloat16)
