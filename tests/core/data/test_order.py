"""The order of samples may never change: a second implementation in plain integers, golden values, and statistics."""

from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_slurm.core.data.order import order_key, permute, permute_many

MASK = 2**64 - 1
COUNTS = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    13,
    31,
    32,
    33,
    97,
    127,
    128,
    129,
    1000,
    1023,
    1024,
    1025,
    4093,
    65535,
    65536,
    65537,
]


def mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def reference(index: int, count: int, key: int) -> int:
    """The same permutation in unbounded integers."""
    rows = isqrt(count - 1) + 1
    columns = (count + rows - 1) // rows
    while True:
        high, low = divmod(index, columns)
        for number in range(8):
            round_key = mix((key + (number + 1) * 0x9E3779B97F4A7C15) & MASK)
            if number % 2 == 0:
                high = (high + mix(low ^ round_key)) % rows
            else:
                low = (low + mix(high ^ round_key)) % columns
        index = high * columns + low
        if index < count:
            return index


@pytest.mark.parametrize("count", COUNTS)
def test_every_index_is_hit_once(count: int) -> None:
    permuted = permute_many(np.arange(count), count, order_key("samples", 0, 3))
    assert sorted(permuted.tolist()) == list(range(count))


@given(count=st.integers(1, 2**40), data=st.data(), key=st.integers(0, MASK))
@settings(max_examples=60, deadline=None)
def test_equals_the_reference(count: int, data: st.DataObject, key: int) -> None:
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
    expected = [reference(index, count, key) for index in indices]
    assert permute_many(np.array(indices), count, key).tolist() == expected
    assert permute(indices[0], count, key) == expected[0]


def test_golden_values() -> None:
    """Written down from version 1. If this fails, every interrupted run would resume with other data."""
    assert order_key("samples", 0, 0) == 0x7EDA95F1B15F7B53
    assert permute_many(np.arange(16), 16, 0x7EDA95F1B15F7B53).tolist() == [
        6,
        2,
        0,
        3,
        12,
        4,
        14,
        11,
        7,
        9,
        1,
        15,
        13,
        10,
        5,
        8,
    ]
    assert [permute(index, 10**12, order_key("samples", 1234, 7)) for index in range(4)] == [
        86849253955,
        59513864354,
        501157285544,
        375964209840,
    ]


def test_out_of_range_is_refused() -> None:
    for index in (-1, 10):
        with pytest.raises(IndexError, match=r"\[0, 10\)"):
            permute(index, 10, 1)


def test_statistics() -> None:
    """Every index goes to every place equally often, neighbours part, and keys are independent of each other."""
    count, keys = 12, 6000
    places = np.zeros((count, count))
    for number in range(keys):
        places[np.arange(count), permute_many(np.arange(count), count, order_key("samples", 0, number))] += 1
    chi_square = ((places - keys / count) ** 2 / (keys / count)).sum()
    degrees = (count - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)

    count = 100_000
    first = permute_many(np.arange(count), count, order_key("samples", 0, 0))
    second = permute_many(np.arange(count), count, order_key("samples", 0, 1))
    for other in (np.arange(count), np.roll(first, 1), second):
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / np.sqrt(count)
    assert (first == second).sum() < 10  # one is expected
    ascents = (np.diff(first) > 0).mean()
    assert abs(ascents - 0.5) < 5 / np.sqrt(count)
