"""Keyed permutations of [0, count): the order of samples and of documents, seekable in O(1) and without state.

The order of a run that resumes hangs on every number here: nothing in this file may ever change its results.
"""

from math import isqrt

import numpy as np
import numpy.typing as npt
import xxhash

Indices = npt.NDArray[np.int64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def order_key(*parts: int | str) -> int:
    """A 64-bit key of a purpose and its numbers, such as ("samples", seed, epoch); the same on every machine."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def permute_many(indices: Indices, count: int, key: int) -> Indices:
    """Where each index of [0, count) goes under the permutation of `key`; one to one for every count.

    A Feistel network over two halves of sizes a and b, a x b >= count, whose rounds add modulo a and b
    (https://www.cs.ucdavis.edu/~rogaway/papers/subset.pdf, methods 2 and 3); what leaves [0, count) walks on along
    its cycle until it is back. As a x b < count + a, walking is rare.
    """
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < count:
        raise IndexError(f"indices {indices.min()}..{indices.max()} are outside of [0, {count})")
    high_size = isqrt(max(count - 1, 0)) + 1
    low_size = -(-count // high_size)
    # Round keys are the outputs of SplitMix64 started at the key.
    rounds = _mix(np.array([(key + _GOLDEN * (n + 1)) & _MASK for n in range(_ROUNDS)], dtype=np.uint64))
    values = _encipher(indices.astype(np.uint64), np.uint64(high_size), np.uint64(low_size), rounds)
    while (outside := values >= np.uint64(count)).any():
        values[outside] = _encipher(values[outside], np.uint64(high_size), np.uint64(low_size), rounds)
    return values.astype(np.int64)


def permute(index: int, count: int, key: int) -> int:
    """Where one index goes; see permute_many."""
    return int(permute_many(np.array([index], dtype=np.int64), count, key)[0])


def _encipher(
    values: npt.NDArray[np.uint64], high_size: np.uint64, low_size: np.uint64, rounds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    high, low = values // low_size, values % low_size
    for number, round_key in enumerate(rounds):
        if number % 2 == 0:
            high = (high + _mix(low ^ round_key) % high_size) % high_size
        else:
            low = (low + _mix(high ^ round_key) % low_size) % low_size
    return high * low_size + low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (https://doi.org/10.1145/2714064.2660195); wraps modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
