import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xxhash

from scaling_slurm.core.topology import random
from scaling_slurm.core.topology.random import keep_mask, key, normal, signed, uniform

Draw = Callable[..., torch.Tensor]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_keys_are_fixed_forever() -> None:
    """Checkpoints do not hold initial values or masks: other keys would make other runs."""
    assert (
        key(0, "embedding.weight") == xxhash.xxh3_64_intdigest(b"int1:0str16:embedding.weight") == 4834182572003063637
    )
    assert key("dropout", 7, "layers.0.mlp") != key("dropout", 7, "layers.0.ml", "p")
    parts: list[tuple[int | str, ...]] = [(1, "2"), ("1", 2), (1, 2), ("1", "2"), (12,), ("12",), (), ("", ""), ("",)]
    assert len({key(*part) for part in parts}) == len(parts)
    assert all(0 <= key(index) < 2**64 for index in range(100))


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_signed_keeps_the_bits(value: int) -> None:
    assert torch.tensor(signed(value)).numpy().view(np.uint64).item() == value


def test_numbers_are_fixed_forever() -> None:
    """The stream against the same arithmetic in numpy's unsigned integers."""
    with np.errstate(over="ignore"):

        def mix(x: np.ndarray) -> np.ndarray:
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))  # type: ignore[no-any-return]

        rows, columns = np.arange(5, dtype=np.uint64)[:, None], np.arange(70, dtype=np.uint64)
        row_keys = mix(mix(rows) ^ np.uint64(key("a")))
        bits = mix((row_keys ^ columns) * np.uint64(0x9E3779B97F4A7C15))
        expected = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    np.testing.assert_array_equal(uniform(key("a"), (5, 70), dtype=torch.float64).numpy(), expected)


def test_masks_are_fixed_forever() -> None:
    """The same for the bits of dropout."""
    with np.errstate(over="ignore"):

        def mix64(x: np.ndarray) -> np.ndarray:
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))  # type: ignore[no-any-return]

        def mix32(x: np.ndarray) -> np.ndarray:
            x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
            x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
            return x ^ (x >> np.uint32(16))  # type: ignore[no-any-return]

        positions = np.array([3, 2**40], dtype=np.uint64)
        samples = mix64(mix64(positions) ^ np.uint64(key("site")))
        rows = mix64((samples[:, None] ^ np.arange(6, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15))[..., None]
        bits = mix32(
            mix32(np.arange(9, dtype=np.uint32) ^ rows.astype(np.uint32)) ^ (rows >> np.uint64(32)).astype(np.uint32)
        )
        expected = (bits ^ np.uint32(2**31)) < round(0.3 * 2**32)
    mask = keep_mask(key("site"), torch.tensor([3, 2**40]), (2, 3, 9), 0.3)
    np.testing.assert_array_equal(mask.numpy(), expected.reshape(2, 2, 3, 9))


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_box_drawn_alone_equals_the_box_of_the_full_tensor(draw: Draw, dtype: torch.dtype, threads: int) -> None:
    shape = (3, 37, 53)
    full = draw(5, shape, dtype=dtype)
    starts = (
        [(0, 3), (1, 2), (2, 1)],
        [(0, 37), (5, 7), (36, 1), (3, 34)],
        [(0, 53), (1, 52), (17, 3), (52, 1), (8, 33)],
    )
    for box in itertools.product(*starts):
        offsets, sizes = zip(*box, strict=True)
        part = draw(5, shape, dtype=dtype, offsets=offsets, sizes=sizes)
        assert torch.equal(part, full[tuple(slice(offset, offset + size) for offset, size in box)]), box


@pytest.mark.parametrize("draw", [uniform, normal])
def test_chunks_do_not_show(draw: Draw, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a chunk, rows that fill no whole chunk, and a thread count that cuts chunks at odd places."""
    for shape in ((2, random.CPU_CHUNK + 77), (90, 1111), (7,), (), (4, 0), (1, 1)):
        whole = draw(9, shape, dtype=torch.float64)
        with monkeypatch.context() as patch:
            patch.setattr(random, "CPU_CHUNK", 1001)
            assert torch.equal(draw(9, shape, dtype=torch.float64), whole)
        assert whole.shape == shape


def test_thread_counts_do_not_show() -> None:
    before, draws = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        draws.append(normal(1, (300, 501), dtype=torch.float64))
    torch.set_num_threads(before)
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_large_tensors_take_little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def watch(numbers: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, numbers.numel())
        return torch.erfinv(2 * numbers - 1) * math.sqrt(2)

    monkeypatch.setattr(torch.special, "ndtri", watch)
    values = normal(1, (3000, 1000))
    assert largest <= random.CPU_CHUNK  # eight bytes each, a handful of temporaries: a few MiB
    assert values.std().item() == pytest.approx(1, abs=0.01)


def test_normal_numbers_are_normal() -> None:
    x = normal(key("quality"), (1000, 1000), dtype=torch.float64)
    count = x.numel()
    assert abs(x.mean().item()) < 4 / math.sqrt(count)
    assert abs(x.var().item() - 1) < 4 * math.sqrt(2 / count)
    assert abs((x**3).mean().item()) < 4 * math.sqrt(15 / count)
    assert abs((x**4).mean().item() - 3) < 4 * math.sqrt(96 / count)
    assert 4.4 < x.abs().max().item() < 6.5
    ordered = x.flatten().sort().values
    exact = torch.special.ndtr(ordered)
    distance = (exact - (torch.arange(count) + 0.5) / count).abs().max().item()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, one in a thousand
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[:, 2:], x[:, :-2]), (x.t(), x)):
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())
    scaled = normal(key("quality"), (1000, 1000), dtype=torch.float64, std=0.02, mean=1.0)
    assert torch.allclose(scaled, x * 0.02 + 1.0, rtol=0, atol=1e-12)


def test_uniform_numbers_are_uniform() -> None:
    x = uniform(key("quality"), (1000, 1000), dtype=torch.float64)
    counts = torch.histc(x, bins=1000, min=0, max=1)
    assert abs(((counts - 1000) ** 2 / 1000).sum().item() - 999) < 5 * math.sqrt(2 * 999)
    pairs = torch.histc((x[:, ::2] * 32).floor() * 32 + (x[:, 1::2] * 32).floor(), bins=1024, min=0, max=1024)
    expected = 500_000 / 1024
    assert abs(((pairs - expected) ** 2 / expected).sum().item() - 1023) < 5 * math.sqrt(2 * 1023)
    bounded = uniform(1, (1000,), low=-0.25, high=0.25)
    assert -0.25 <= bounded.min().item() < -0.24
    assert 0.24 < bounded.max().item() <= 0.25


def test_different_keys_are_independent() -> None:
    draws = torch.stack([normal(key(seed, "w"), (300, 300), dtype=torch.float64).flatten() for seed in range(8)])
    correlation = torch.corrcoef(draws) - torch.eye(8)
    assert correlation.abs().max().item() < 5 / 300
    close = normal(0, (300, 300), dtype=torch.float64), normal(1, (300, 300), dtype=torch.float64)
    assert abs((close[0] * close[1]).mean().item()) < 5 / 300


MASK_SHAPE = (64, 256)


def mask_of(site: int, positions: list[int], probability: float = 0.5) -> torch.Tensor:
    return keep_mask(site, torch.tensor(positions), MASK_SHAPE, probability)


@pytest.mark.parametrize("probability", [0.9, 0.5, 0.1, 0.999])
def test_masks_keep_the_probability(probability: float) -> None:
    mask = keep_mask(key("p"), torch.arange(64), MASK_SHAPE, probability)
    count = mask.numel()
    spread = math.sqrt(probability * (1 - probability))
    assert abs(mask.double().mean().item() - probability) < 4 * spread / math.sqrt(count)
    per_row, per_column = mask.double().mean(dim=2), mask.double().mean(dim=(0, 1))
    assert abs(per_row.std().item() / (spread / math.sqrt(256)) - 1) < 0.06
    assert (per_column - probability).abs().max().item() < 5.5 * spread / math.sqrt(64 * 64)


def test_neighbours_in_a_mask_are_independent() -> None:
    x = keep_mask(key("n"), torch.arange(64), MASK_SHAPE, 0.5).double() * 2 - 1
    shifted = [(x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[..., 1:], x[..., :-1]), (x[..., 2:], x[..., :-2])]
    shifted += [(x[..., 128:], x[..., :128]), (x[:32], x[32:])]
    for a, b in shifted:
        assert abs((a * b).mean().item()) < 4 / math.sqrt(a.numel())
    octets = (x.reshape(-1, 8) > 0).long() @ (2 ** torch.arange(8))
    counts = torch.bincount(octets, minlength=256).double()
    expected = octets.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * math.sqrt(2 * 255)


def test_masks_differ_between_sites_and_positions() -> None:
    base = mask_of(key(0, "a"), [5])
    for other in (mask_of(key(0, "b"), [5]), mask_of(key(1, "a"), [5]), mask_of(key(0, "a"), [6]), mask_of(1, [5])):
        assert abs((base == other).double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(base.numel())
    far = mask_of(key(0, "a"), [5 + 2**32])
    assert abs((base == far).double().mean().item() - 0.5) < 0.02


def test_a_mask_does_not_depend_on_its_batch() -> None:
    together = mask_of(3, [10, 11, 12, 13], 0.8)
    assert torch.equal(together[2:], mask_of(3, [12, 13], 0.8))
    assert torch.equal(together[[3, 0]], mask_of(3, [13, 10], 0.8))
    assert torch.equal(mask_of(3, [10], 1.0), torch.ones(1, *MASK_SHAPE, dtype=torch.bool))


def test_a_mask_of_samples_of_one_dimension_and_of_none() -> None:
    positions = torch.arange(5)
    assert keep_mask(1, positions, (7,), 0.5).shape == (5, 7)
    assert keep_mask(1, positions, (), 0.5).shape == (5,)
    tensor_key = torch.tensor(signed(key("x")))
    assert torch.equal(keep_mask(tensor_key, positions, (7,), 0.5), keep_mask(key("x"), positions, (7,), 0.5))
