import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.pipeline.parallel_module import LayerSpec, ParallelModule
from scaling_slurm.core.topology.topology import Topology


class Sites(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Dropout(0.5), Dropout(0.5)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        x = torch.ones(len(positions), 16, 32)
        return torch.stack([self.first(x, positions), self.second(x, positions)])


def masks(seed: int, positions: torch.Tensor) -> torch.Tensor:
    model = ParallelModule([LayerSpec(f"layers.{index}", Sites) for index in range(2)])
    model.bind(Topology(), seed=seed, dtype=torch.float32)
    return torch.cat([model.get_submodule(f"layers.{index}")(positions) for index in range(2)])  # [site, batch, ...]


def test_kept_elements_are_scaled_and_the_mean_stays() -> None:
    x = torch.randn(64, 32, 64, dtype=torch.float64)
    y = Dropout(0.25)(x, torch.arange(64))
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75, rtol=1e-15, atol=0)
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.005)
    assert y.dtype == torch.float64
    assert Dropout(0.25)(x.bfloat16(), torch.arange(64)).dtype == torch.bfloat16


def test_the_gradient_has_the_mask_of_the_forward_pass() -> None:
    x = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.5)(x, torch.arange(4))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (y != 0) * 2.0)


def test_nothing_happens_in_evaluation_and_at_probability_0() -> None:
    x, positions = torch.randn(2, 3), torch.arange(2)
    assert Dropout(0.9).eval()(x, positions) is x
    assert Dropout(0.0)(x, positions) is x


def test_infinities_are_not_hidden() -> None:
    y = Dropout(0.5)(torch.full((8, 8), float("nan")), torch.arange(8))
    assert y.isnan().all()


def test_masks_follow_samples_not_micro_batches() -> None:
    positions = torch.arange(100, 108)
    together = masks(3, positions)
    for size in (1, 2, 4):
        assert torch.equal(torch.cat([masks(3, part) for part in positions.split(size)], dim=1), together)  # type: ignore[no-untyped-call]


def test_masks_differ_between_sites_layers_samples_epochs_and_seeds() -> None:
    samples_per_epoch = 1000
    positions = torch.tensor([0, 1, samples_per_epoch, 2 * samples_per_epoch])
    seeds = torch.stack([masks(0, positions), masks(1, positions)])  # [seed, site, batch, ...]
    every = (seeds != 0).flatten(0, 2).flatten(1).double()
    assert len(every) == 2 * 4 * 4
    assert (torch.corrcoef(every) - torch.eye(len(every))).abs().max().item() < 5 / every.shape[1] ** 0.5
    assert torch.equal(masks(0, positions), seeds[0])


def test_recomputation_repeats_the_mask_and_no_generator_is_touched() -> None:
    dropout, positions = Dropout(0.5), torch.arange(4)
    state = torch.get_rng_state()
    gradients = []
    for recompute in (False, True):
        x = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
        if recompute:
            y = checkpoint(dropout, x, positions, use_reentrant=False, preserve_rng_state=False)
        else:
            y = dropout(x, positions)
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mask_traces_without_breaks_and_without_one_graph_a_key() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    model = ParallelModule([LayerSpec(f"layers.{index}", lambda: Dropout(0.5)) for index in range(3)])
    model.bind(Topology(), seed=0, dtype=torch.float32)
    x, positions = torch.randn(2, 5, 6), torch.arange(2)
    compiled = torch.compile(lambda layer, x: layer(x, positions), backend=count, fullgraph=True)
    for index in range(3):
        layer = model.get_submodule(f"layers.{index}")
        assert torch.equal(compiled(layer, x), layer(x, positions))
    assert graphs <= 2
