import logging
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scaling_slurm.core.checkpoint import reader
from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.manifest import Box, CheckpointError, Entry, Manifest, serialise
from scaling_slurm.core.checkpoint.reader import CheckpointReader, choose_together, read
from scaling_slurm.core.checkpoint.tensor_file import describe, write_file
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import ConfigError, RefusedError
from tests.support.checkpoints import flip_bit, make_tensors, save
from tests.support.distributed import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def empty_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.full_like(tensor, float("nan")) for key, tensor in tensors.items()}


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.contiguous().view(-1).view(torch.uint8).tolist() == (
        expected.contiguous().view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    backing = torch.randn(40, 30, dtype=torch.float64).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(dtype).tiny / 2], dtype=dtype)
    named = {
        "scalar": backing[3, 4], "empty": backing[:0], "odd": backing[:7, :3], "transposed": backing.t(),
        "special": special, "cube": torch.randn(3, 5, 7, dtype=torch.float64).to(dtype),
    }  # fmt: skip
    tensors = {f"{kind}/{name}": tensor for name, tensor in named.items() for kind in ["weight", "exp_avg"]}
    checkpoint = save(tmp_path, 1, tensors=tensors).checkpoint
    found = empty_like({key: tensor.contiguous() for key, tensor in tensors.items()})
    found["weight/cube"] = torch.full((7, 5, 3), float("nan"), dtype=dtype).permute(2, 1, 0)  # a target that is a view
    read(checkpoint, found)
    for key, tensor in tensors.items():
        assert_same_bits(found[key], tensor)


def save_and_read(topology: Topology, path: Path) -> bool:
    tensors = make_tensors(4, torch.bfloat16)
    save(path, 4, tensors=tensors, topology=topology)
    chosen = choose_together(CheckpointDirectory(path), topology)
    assert chosen is not None
    found = empty_like(tensors)
    read(chosen, found)
    return all(torch.equal(found[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_ranks_write_they_read(tmp_path: Path, num_ranks: int) -> None:
    assert run_ranks(num_ranks, save_and_read, tmp_path) == [True] * num_ranks


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, tensors={"weight/w": torch.ones(2, 3)}).checkpoint
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    read(checkpoint, {"weight/w": parameter})
    assert parameter.tolist() == [[1.0] * 3] * 2
    assert parameter.requires_grad


def test_weights_can_be_read_without_the_optimizer_state(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    found = empty_like({key: tensor for key, tensor in tensors.items() if key.startswith("weight/")})
    read(save(tmp_path, 1).checkpoint, found)
    assert all(torch.equal(found[key], tensors[key]) for key in found)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1).checkpoint
    wanted = make_tensors(2)
    renamed = wanted | {"weight/layers.9.b": torch.zeros(3)}
    del renamed["weight/layers.3.b"]
    for tensors, messages in [
        (
            renamed,
            [
                r"it has no weight/layers\.9\.b \(nearest: weight/layers\.\d\.b\)",
                r"has weight/layers\.3\.b, which is not wanted \(nearest: weight/layers\.\d\.b\)",
            ],
        ),
        (
            wanted | {"weight/layers.0.w": torch.zeros(5, 7)},
            [r"has weight/layers\.0\.w of shape \(7, 5\) where \(5, 7\)"],
        ),
        (
            wanted | {"exp_avg/layers.0.b": torch.zeros(3, dtype=torch.bfloat16)},
            [r"has exp_avg/layers\.0\.b in float32 where bfloat16 is wanted"],
        ),
        (make_tensors(2, torch.float64), ["in float32 where float64 is wanted", r"\(and 19 more\)"]),
    ]:
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        with pytest.raises(ConfigError) as raised:
            read(checkpoint, tensors)
        for message in messages:
            raised.match(message)
        assert all(torch.equal(before[key], tensors[key]) for key in tensors), "nothing may be loaded in part"
    with CheckpointReader(checkpoint) as opened, pytest.raises(ConfigError, match=r"has no weight/layers\.0\.ww"):
        opened.read_box("weight", "layers.0.ww", ((0, 1),))


def test_a_file_that_breaks_while_it_is_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1).checkpoint
    weights = checkpoint.path / "weights-00000-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"weights-00000-of-00001\.safetensors ends at byte"):
        read(checkpoint, make_tensors(1))
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(checkpoint, make_tensors(1))


# Pieces of any form


def write_in_pieces(path: Path, full: Tensor, pieces: list[tuple[Box, tuple[int, int] | None]]) -> Checkpoint:
    """A checkpoint of one tensor "w", each piece in a file of its own."""
    checkpoint = CheckpointDirectory(path).checkpoint(1, 1)
    checkpoint.path.mkdir(exist_ok=True)
    files, entries = {}, []
    for number, (box, flat_range) in enumerate(pieces):
        data = full[tuple(slice(*span) for span in box)].reshape(-1)
        data = data if flat_range is None else data[slice(*flat_range)]
        name = f"weights-{number:05d}-of-{len(pieces):05d}.safetensors"
        header, [entry] = describe(name, {"weight/w": data})
        files[name] = write_file(checkpoint.path / name, header, [data])
        where = {"shape": tuple(full.shape), "box": box, "flat_range": flat_range}
        entries.append(Entry(**{**entry.model_dump(), **where}))
    manifest = Manifest(
        step=1, attempt=1, written_at="", state={}, config={}, layout={"data": len(pieces)}, data_fingerprint="",
        files=files, entries=tuple(entries),
    )  # fmt: skip
    checkpoint.manifest_file.write_text(serialise(manifest))
    return checkpoint


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, tuple[int, int] | None]], Box]:
    """A shape, a way to cut it (along one dimension, then each part into flat ranges), and a box that is wanted."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    parts: list[Box] = [tuple((0, size) for size in shape)]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, shape[dim]))
        whole = parts[0]
        parts = [(*whole[:dim], span, *whole[dim + 1 :]) for span in [(0, at), (at, shape[dim])]]
    pieces: list[tuple[Box, tuple[int, int] | None]] = []
    for part in parts:
        count = torch.empty(shape)[tuple(slice(*span) for span in part)].numel()
        cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        ranges = list(pairwise(cuts))
        pieces += [(part, span) for span in ranges] if len(ranges) > 1 else [(part, None)]
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, draw(st.permutations(pieces)), tuple(box)


@settings(deadline=None, max_examples=100)
@given(layouts(), st.sampled_from(DTYPES), st.sampled_from([1, 16, 1 << 20]), st.sampled_from([1, 64, 1 << 20]))
def test_any_box_is_assembled_from_any_pieces(
    case: tuple[tuple[int, ...], list[tuple[Box, tuple[int, int] | None]], Box],
    dtype: torch.dtype,
    seek: int,
    staging: int,
) -> None:
    shape, pieces, box = case
    full = torch.randn(shape, dtype=torch.float64).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_in_pieces(Path(folder), full, pieces)
        assert CheckpointDirectory(checkpoint.path.parent).verify(checkpoint) == []
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(reader, "_SEEK_BYTES", seek)
            patches.setattr(reader, "_STAGING_BYTES", staging)
            with CheckpointReader(checkpoint) as opened:
                assert_same_bits(opened.read_box("weight", "w", box), full[tuple(slice(*span) for span in box)])
            whole = {"weight/w": torch.full(shape, float("nan"), dtype=dtype)}
            read(checkpoint, whole)
            assert_same_bits(whole["weight/w"], full)


def test_elements_that_no_piece_holds_are_noticed(tmp_path: Path) -> None:
    checkpoint = write_in_pieces(tmp_path, torch.ones(4, 4), [(((0, 4), (0, 4)), (0, 10))])
    with CheckpointReader(checkpoint) as opened:
        assert opened.read_box("weight", "w", ((0, 2), (0, 4))).tolist() == [[1.0] * 4] * 2
        with pytest.raises(CheckpointError, match="holds 2 of 4 elements of box"):
            opened.read_box("weight", "w", ((2, 3), (0, 4)))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(original(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path, bytes_read: list[int]) -> None:
    full = torch.randn(8, 16384)
    checkpoint = save(tmp_path, 1, tensors={"weight/w": full}).checkpoint
    with CheckpointReader(checkpoint) as opened:
        for box, num_reads in [(((2, 4), (0, 16384)), 1), (((0, 8), (8192, 16384)), 8)]:
            bytes_read.clear()
            part = opened.read_box("weight", "w", box)
            assert torch.equal(part, full[tuple(slice(*span) for span in box)])
            assert (len(bytes_read), sum(bytes_read)) == (num_reads, part.nbytes)


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save(tmp_path, 1).checkpoint
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: original(file, [buffers[0][:5]], offset))
    found = empty_like(make_tensors(1))
    read(checkpoint, found)
    assert all(torch.equal(found[key], tensor) for key, tensor in make_tensors(1).items())


# All ranks together


def choose_on_ranks(topology: Topology, path: Path) -> tuple[int | None, str]:
    if topology.rank > 0:  # a rank whose view of the directory is behind must not choose another one
        CheckpointDirectory.committed = lambda self: []  # type: ignore[method-assign]
    try:
        chosen = choose_together(CheckpointDirectory(path), topology)
    except RefusedError as error:
        return None, str(error)
    return (chosen.step if chosen else None), ""


def test_ranks_choose_the_same_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks(2, choose_on_ranks, tmp_path / "none") == [(None, "")] * 2
    for step in [9, 10, 11, 12]:
        run_ranks(2, save_step, tmp_path, step)
    steps = {one.step: one.path for one in CheckpointDirectory(tmp_path).committed()}
    flip_bit(steps[12] / "optimizer-00001-of-00002.safetensors", -3)
    flip_bit(steps[11] / "manifest.json", 99)
    assert run_ranks(2, choose_on_ranks, tmp_path) == [(10, "")] * 2
    with caplog.at_level(logging.WARNING):
        chosen = choose_together(CheckpointDirectory(tmp_path), Topology())
    assert chosen is not None
    assert chosen.step == 10
    assert [record.message.split(": ")[0] for record in caplog.records] == [
        "checkpoint step-00000012-attempt-001 is passed over",
        "checkpoint step-00000011-attempt-001 is passed over",
    ]
    assert "optimizer-00001-of-00002.safetensors does not match its digest" in caplog.records[0].message


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 5).checkpoint
    flip_bit(checkpoint.path / "weights-00000-of-00001.safetensors", -1)
    message = f"of the checkpoints in {tmp_path} none is whole: {checkpoint.name}; repair one, or remove them"
    for step, text in run_ranks(2, choose_on_ranks, tmp_path):
        assert step is None
        assert message in text


def save_step(topology: Topology, path: Path, step: int) -> None:
    save(path, step, topology=topology)


def test_twelve_shards_are_read_exactly(tmp_path: Path) -> None:
    full = torch.arange(120.0).reshape(12, 10)
    pieces: list[tuple[Box, tuple[int, int] | None]] = [(((0, 12), (0, 10)), (10 * i, 10 * i + 10)) for i in range(12)]
    found = {"weight/w": torch.empty(12, 10)}
    read(write_in_pieces(tmp_path, full, pieces), found)
    assert torch.equal(found["weight/w"], full)
