from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from scaling_slurm.core.tensor_parallel import cross_entropy
from scaling_slurm.core.tensor_parallel.cross_entropy import linear_cross_entropy

TOKENS, WIDTH, VOCAB = 37, 16, 101
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[[0, 7, 36]] = -100
    return hidden.to(dtype), weight.to(dtype), targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy((hidden @ weight.t()), targets, reduction="sum")


def run(
    loss: Loss, dtype: torch.dtype, factor: float = 1.0, inputs_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Loss and gradients as float64; `dtype` inputs hold values that are exact in `inputs_dtype`."""
    hidden, weight, targets = make_inputs(inputs_dtype or dtype)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    value = loss(hidden, weight, targets)
    (value * factor).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return value.detach().double(), hidden.grad.double(), weight.grad.double()


@pytest.mark.parametrize("chunk", [None, 1, 5, 36, 37, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_loss_and_gradients_equal_torch(chunk: int | None, dtype: torch.dtype, tolerance: float) -> None:
    expected = run(plain, torch.float64, factor=0.125, inputs_dtype=dtype)
    actual = run(lambda h, w, t: linear_cross_entropy(h, w, t, chunk), dtype, factor=0.125)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_bfloat16_has_a_float32_loss_and_gradients_as_good_as_torch() -> None:
    exact = run(plain, torch.float64, inputs_dtype=torch.bfloat16)
    theirs = run(lambda h, w, t: plain(h, w, t), torch.bfloat16)
    hidden, weight, targets = make_inputs(torch.bfloat16)
    assert linear_cross_entropy(hidden, weight, targets, 4).dtype == torch.float32
    ours = run(lambda h, w, t: linear_cross_entropy(h, w, t, 4), torch.bfloat16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 1.1 * (b - c).norm() + 1e-3 * c.norm()


def test_the_weight_gradient_is_summed_in_float32() -> None:
    """A large first chunk and many small ones, each below half a bfloat16 step of the sum."""
    hidden = torch.full((513, 1), 2.0**-7, dtype=torch.bfloat16)
    hidden[0] = 4.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(513, dtype=torch.int64), 1).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-4.0, 4.0]  # 2 + 512 * 2^-8, where bfloat16 steps are 2^-6


def test_ignored_targets_count_nothing() -> None:
    hidden, weight, _ = make_inputs(torch.float64)
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full((TOKENS,), -100), 10)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_infinities_reach_the_loss() -> None:
    hidden, weight, targets = make_inputs(torch.float32)
    hidden[5, 0] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize(("hidden_grad", "weight_grad"), [(True, False), (False, True)])
def test_only_wanted_gradients_are_computed(hidden_grad: bool, weight_grad: bool) -> None:
    hidden, weight, targets = make_inputs(torch.float64)
    hidden.requires_grad_(hidden_grad)
    weight.requires_grad_(weight_grad)
    linear_cross_entropy(hidden, weight, targets, 10).backward()  # type: ignore[no-untyped-call]
    _, expected_hidden, expected_weight = run(plain, torch.float64)
    for tensor, wanted, expected in (
        (hidden, hidden_grad, expected_hidden),
        (weight, weight_grad, expected_weight),
    ):
        if wanted:
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad, expected, rtol=1e-12, atol=1e-12)
        else:
            assert tensor.grad is None


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any tensor that an operation returns, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        self.products += function is torch.ops.aten.mm.default
        return result


def watch(chunk: int | None, requires_grad: bool = True) -> LargestTensor:
    hidden, weight, targets = make_inputs(torch.float32)
    with LargestTensor() as seen:
        loss = linear_cross_entropy(
            hidden.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), targets, chunk
        )
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return seen  # type: ignore[no-any-return]


def test_the_full_logits_never_exist() -> None:
    assert watch(4).largest == max(VOCAB * WIDTH, 4 * VOCAB)
    assert watch(20).largest == 20 * VOCAB < TOKENS * VOCAB


def test_small_logits_are_one_chunk_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(None).products == 3
    assert watch(None, requires_grad=False).products == 1
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 4 * VOCAB * 10)
    assert watch(None).products == 3 * 4


def test_a_second_backward_is_an_error_not_a_wrong_gradient() -> None:
    hidden, weight, targets = make_inputs(torch.float64)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises((RuntimeError, AttributeError)):
        loss.backward()  # type: ignore[no-untyped-call]


def test_evaluation_computes_no_gradients() -> None:
    with torch.no_grad():
        assert watch(10).products == 4
