import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_slurm.core.checkpoint.manifest import (
    Box,
    CheckpointError,
    Entry,
    FileRecord,
    Manifest,
    coverage_problems,
    cut,
    intersect,
    parse,
    serialise,
)


def entry(
    shape: tuple[int, ...], box: Box | None = None, flat_range: tuple[int, int] | None = None, **fields: Any
) -> Entry:
    box = tuple((0, size) for size in shape) if box is None else box
    known: dict[str, Any] = {"name": "w", "kind": "weight", "dtype": "float32", "file": "f.safetensors", "offset": 8}
    return Entry(shape=shape, box=box, flat_range=flat_range, tensor="w", **(known | fields))


def manifest(**fields: Any) -> Manifest:
    known: dict[str, Any] = {
        "step": 120,
        "attempt": 2,
        "written_at": "2025-01-02T03:04:05+00:00",
        "state": {"consumed_samples": 2**62, "loss": 0.1},
        "config": {"trainer": {"seed": 0}, "name": "größe"},
        "layout": {"tensor": 1, "pipeline": 1, "data": 2},
        "data_fingerprint": "abc",
        "files": {"f.safetensors": FileRecord(bytes=148, xxh3_128="0" * 32)},
        "entries": (entry((5, 7), flat_range=(0, 20)), entry((5, 7), flat_range=(20, 35), offset=88)),
    }
    return Manifest(**(known | fields))


def test_what_is_written_is_read_back() -> None:
    assert parse(serialise(manifest()).encode()) == manifest()
    assert serialise(manifest()).count('"name": "w"') == 2


def test_keys_that_are_numbers_do_not_break_the_digest() -> None:
    assert parse(serialise(manifest(state={"x": {10: 1, 9: 2}})).encode()).state == {"x": {"10": 1, "9": 2}}


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"x": object()}])
def test_a_state_that_is_not_json_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="state or config of step 120 is not JSON"):
        serialise(manifest(state=state))


def test_a_flipped_bit_anywhere_is_found() -> None:
    text, harmless = serialise(manifest()).encode(), 0
    for position in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[position] ^= 1 << bit
            try:
                found = parse(bytes(damaged))
            except CheckpointError:
                continue
            assert found == manifest(), "only another spelling of the same, such as \\u00f6 and \\u00F6, may pass"
            harmless += 1
    assert harmless < 8


def test_a_torn_manifest_is_found_wherever_it_ends() -> None:
    text = serialise(manifest()).encode()
    for length in range(len(text) - 2):
        with pytest.raises(CheckpointError):
            parse(text[:length])


def test_a_future_format_is_refused_by_its_number() -> None:
    record = json.loads(serialise(manifest()))
    with pytest.raises(CheckpointError, match="format version 2 is unknown; this program reads version 1"):
        parse(json.dumps(record | {"format_version": 2}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"box": ((0, 5),)},
        {"box": ((0, 5), (0, 8))},
        {"box": ((3, 2), (0, 7))},
        {"flat_range": (0, 36)},
        {"flat_range": (9, 8)},
        {"dtype": "int32"},
        {"kind": "gradient"},
        {"file": "../other/f.safetensors"},
    ],
)
def test_entries_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        entry((5, 7), **fields)


def test_entries_beyond_their_file_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight/w lies beyond the end of f\.safetensors"):
        manifest(entries=(entry((5, 7), offset=9),))
    with pytest.raises(ValueError, match="which is not among the files"):
        manifest(files={})


@st.composite
def boxes_with_ranges(draw: st.DrawFn) -> tuple[Box, int, int]:
    box = tuple((start, start + draw(st.integers(1, 4))) for start in draw(st.lists(st.integers(0, 3), max_size=4)))
    count = int(np.prod([stop - start for start, stop in box]))
    start, stop = sorted((draw(st.integers(0, count)), draw(st.integers(0, count))))
    return box, start, stop


@settings(deadline=None)
@given(boxes_with_ranges())
def test_cut_gives_the_elements_of_a_range_in_order(case: tuple[Box, int, int]) -> None:
    box, start, stop = case
    numbers = np.arange(8**4).reshape(8, 8, 8, 8)[(0,) * (4 - len(box))]
    expected = numbers[tuple(slice(*span) for span in box)].reshape(-1)[start:stop]
    pieces = [numbers[tuple(slice(*span) for span in piece)].reshape(-1) for piece in cut(box, start, stop)]
    assert np.concatenate([*pieces, np.empty(0, int)]).tolist() == expected.tolist()
    assert len(pieces) <= max(1, 2 * len(box) - 1)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry(())], None),
        ([entry((0, 3))], None),
        ([entry((5, 7))], None),
        ([entry((5, 7), flat_range=(a, b)) for a, b in pairwise((0, 3, 3, 20, 35))], None),
        ([entry((4, 6), ((0, 4), (0, 2))), *[entry((4, 6), ((0, 4), (2, 6)), r) for r in [(0, 9), (9, 16)]]], None),
        ([entry((5, 7)), entry((5, 7))], "held twice"),
        ([entry(()), entry(())], "held twice"),
        ([entry((5, 7), flat_range=(0, 21)), entry((5, 7), flat_range=(20, 35))], "held twice"),
        ([entry((5, 7), ((0, 3), (0, 7))), entry((5, 7), flat_range=(20, 35))], "held twice"),
        ([entry((5, 7), ((0, 3), (0, 7)))], "has 21 of its 35 elements"),
        ([entry((5, 7), flat_range=(0, 34))], "has 34 of its 35 elements"),
        ([entry((2,), ((0, 1),)), entry((2,), ((1, 2),), dtype="float64")], "several shapes or dtypes"),
    ],
)  # fmt: skip
def test_coverage_is_every_element_exactly_once(entries: list[Entry], problem: str | None) -> None:
    problems = coverage_problems(entries)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_boxes_intersect_where_numpy_says_so() -> None:
    assert intersect(((0, 3), (2, 5)), ((2, 9), (0, 3))) == ((2, 3), (2, 3))
    assert intersect(((0, 3),), ((3, 5),)) is None
    assert intersect((), ()) == ()
