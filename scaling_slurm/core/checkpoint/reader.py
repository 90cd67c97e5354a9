"""Reads tensors, or boxes of them, out of a checkpoint, whatever pieces they were written in; chooses one together.

Knows no model: it is told which tensors are wanted, and takes neither other names, shapes nor dtypes.
"""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.manifest import Box, CheckpointError, Entry, Kind, cut, intersect, sizes, volume
from scaling_slurm.core.checkpoint.tensor_file import DTYPE_NAMES, bytes_of
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import ConfigError, RefusedError

logger = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, (name, _) in DTYPE_NAMES.items()}
_STAGING_BYTES = 32 << 20
_SEEK_BYTES = 32 << 10
"""Rows at least this long are read one by one when only a part of each is wanted; shorter ones whole."""


class CheckpointReader:
    """Open files of one checkpoint; a context manager. Digests are not computed here: choose verified them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._descriptors: dict[str, int] = {}
        self.entries = checkpoint.manifest.by_key()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_box(self, kind: Kind, name: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU, in the dtype it was written in; raises ConfigError for an unknown name."""
        entries = self.entries.get(f"{kind}/{name}")
        if not entries:
            raise ConfigError(f"{self._checkpoint.name} {_missing(f'{kind}/{name}', self.entries)}")
        target = torch.empty(sizes(box), dtype=_DTYPES[entries[0].dtype])
        self.fill(target, entries, box)
        return target

    def fill(self, target: Tensor, entries: Iterable[Entry], box: Box) -> None:
        """Copy a box of a tensor into `target`, which has its extent; reads only pieces that touch the box."""
        filled = 0
        for entry in entries:
            start, stop = entry.elements
            offset = entry.offset
            for piece in cut(entry.box, start, stop):
                common = intersect(piece, box)
                if common is not None:
                    part = target[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))]
                    inner = tuple((a - o, b - o) for (a, b), (o, _) in zip(common, piece, strict=True))
                    self._copy(part, entry.file, offset, sizes(piece), inner)
                    filled += volume(common)
                offset += volume(piece) * target.itemsize
        if filled != target.numel():
            raise CheckpointError(f"{self._checkpoint.name} holds {filled} of {target.numel()} elements of box {box}")

    def _copy(self, target: Tensor, file: str, offset: int, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box of a row-major array that lies at `offset` in a file."""
        if not shape:
            shape, box, target = (1,), ((0, 1),), target.view(1)
        (start, stop), row = box[0], prod(shape[1:]) * target.itemsize
        whole_rows = sizes(box[1:]) == shape[1:]
        if not whole_rows and row >= _SEEK_BYTES:
            for index in range(start, stop):
                self._copy(target[index - start], file, offset + index * row, shape[1:], box[1:])
            return
        if whole_rows and target.is_contiguous() and target.device.type == "cpu":
            self._read(target, file, offset + start * row)
            return
        step = max(1, _STAGING_BYTES // row)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            staging = torch.empty((last - first, *shape[1:]), dtype=target.dtype)
            self._read(staging, file, offset + first * row)
            target[first - start : last - start].copy_(staging[(slice(None), *(slice(*span) for span in box[1:]))])

    def _read(self, target: Tensor, file: str, offset: int) -> None:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._checkpoint.path / file, os.O_RDONLY)
        view = bytes_of(target)
        while view:
            count = os.preadv(self._descriptors[file], [view], offset)
            if count == 0:
                raise CheckpointError(f"{self._checkpoint.path / file} ends at byte {offset}")
            view, offset = view[count:], offset + count


def read(checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> None:
    """Fill the given full tensors, by "kind/logical name", with what the checkpoint holds.

    Of each kind that is wanted, exactly the tensors of the checkpoint must be asked for. Raises ConfigError that names
    the tensors which are missing, unexpected, or of another shape or dtype: nothing is cast. A file that cannot be read
    is a CheckpointError.
    """
    with CheckpointReader(checkpoint) as reader:
        if problems := list(_mismatches(reader.entries, wanted)):
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise ConfigError(
                f"{checkpoint.path} does not fit the model: it {', '.join(problems[:5])}{more}",
                "names, shapes and dtypes must be those that were saved",
                "the model and trainer.precision in the run file",
            )
        try:
            for key, tensor in wanted.items():
                reader.fill(tensor.detach(), reader.entries[key], tuple((0, size) for size in tensor.shape))
        except OSError as error:
            raise CheckpointError(f"{checkpoint.path} cannot be read: {error}") from error


def _mismatches(entries: Mapping[str, list[Entry]], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    """Phrases that go after "the checkpoint"."""
    for key, tensor in wanted.items():
        if key not in entries:
            yield _missing(key, entries)
            continue
        saved = entries[key][0]
        if saved.shape != tuple(tensor.shape):
            yield f"has {key} of shape {saved.shape} where {tuple(tensor.shape)} is wanted"
        if _DTYPES[saved.dtype] is not tensor.dtype:
            yield f"has {key} in {saved.dtype} where {str(tensor.dtype).removeprefix('torch.')} is wanted"
    kinds = {key.partition("/")[0] for key in wanted}
    for key in entries:
        if key not in wanted and key.partition("/")[0] in kinds:
            yield f"has {key}, which is not wanted{_nearest(key, wanted)}"


def _missing(key: str, entries: Mapping[str, list[Entry]]) -> str:
    return f"has no {key}{_nearest(key, entries)}"


def _nearest(key: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    return f" (nearest: {near[0]})" if near else ""


def choose_together(directory: CheckpointDirectory, topology: Topology) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written, the same on all ranks; each reads some of the files.

    None when none was ever committed. Raises RefusedError when there are only damaged ones: to start anew would be a
    loss that nobody asked for.
    """
    committed: list[Checkpoint] = topology.broadcast_object(directory.committed())
    for checkpoint in committed:
        shares = topology.all_gather_object(_problems_of_share(checkpoint, topology.rank, topology.layout.world_size))
        problems = sorted({problem for share in shares for problem in share})
        if not problems:
            return checkpoint
        if topology.rank == 0:
            logger.warning("checkpoint %s is passed over: %s", checkpoint.name, "; ".join(problems))
    if committed:
        raise RefusedError(
            f"of the checkpoints in {directory.path} none is whole: {', '.join(one.name for one in committed)}",
            "repair one, or remove them all to start from the first step",
        )
    return None


def _problems_of_share(checkpoint: Checkpoint, rank: int, num_ranks: int) -> list[str]:
    if problems := checkpoint.problems():
        return problems
    files = sorted(checkpoint.manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    checked = (checkpoint.file_problem(name, record) for name, record in files[rank::num_ranks])
    return [problem for problem in checked if problem]
