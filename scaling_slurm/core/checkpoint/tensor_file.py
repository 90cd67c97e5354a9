"""One file of tensors in the safetensors format (https://github.com/huggingface/safetensors), written by hand.

So no tensor is copied as a whole, and the digest is computed on the way. Knows neither ranks nor checkpoints.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from scaling_slurm.core.checkpoint.manifest import Entry, FileRecord, Kind

logger = logging.getLogger(__name__)

DTYPE_NAMES = {
    torch.float64: ("float64", "F64"),
    torch.float32: ("float32", "F32"),
    torch.bfloat16: ("bfloat16", "BF16"),
    torch.float16: ("float16", "F16"),
}
"""In the manifest and in a safetensors header."""
_PIECE_BYTES = 32 << 20
_ALIGNMENT = 64
_RETRY_SECONDS = (0.2, 1.0, 5.0)
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT}
"""What a network file system says in a bad moment."""


def describe(file: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Entry]]:
    """The head of a safetensors file, and its entries in the order of their data: widest dtype first, so aligned."""
    record: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: (-tensors[key].itemsize, key)):
        tensor, offsets[key] = tensors[key], end
        end += tensor.nbytes
        record[key.removeprefix("weight/")] = {
            "dtype": DTYPE_NAMES[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[key], end],
        }
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [_whole(file, key, tensors[key], len(header) + offset) for key, offset in offsets.items()]


def _whole(file: str, key: str, tensor: Tensor, offset: int) -> Entry:
    kind, _, name = key.partition("/")
    return Entry(
        name=name,
        kind=cast(Kind, kind),
        shape=tuple(tensor.shape),
        box=tuple((0, size) for size in tensor.shape),
        dtype=cast(Any, DTYPE_NAMES[tensor.dtype][0]),
        file=file,
        tensor=key.removeprefix("weight/"),
        offset=offset,
    )


def write_file(path: Path, header: bytes, tensors: Sequence[Tensor]) -> FileRecord:
    """Write, digest and fsync one file. A transient error starts it over: a failed fsync has dropped pages."""
    for seconds in (*_RETRY_SECONDS, None):
        try:
            return _write_once(path, header, tensors)
        except OSError as error:
            if seconds is None or error.errno not in _TRANSIENT:
                raise
            logger.warning("%s: %s; trying again in %s s", path, error, seconds)
            time.sleep(seconds)
    raise AssertionError("the last round returns or raises")


def _write_once(path: Path, header: bytes, tensors: Iterable[Tensor]) -> FileRecord:
    state, size = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for view in _pieces(header, tensors):
            state.update(view)
            size += len(view)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(bytes=size, xxh3_128=state.hexdigest())


def _pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """All bytes of a file, in pieces: a tensor on a GPU, or one that is a view, is copied a piece at a time."""
    yield memoryview(header)
    for tensor in tensors:
        if tensor.numel():
            rows = tensor.detach()
            rows = rows.view(-1) if rows.is_contiguous() else rows
            step = max(1, _PIECE_BYTES // rows[0].nbytes)
            for first in range(0, len(rows), step):
                yield bytes_of(rows[first : first + step].contiguous().cpu())


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor without gradient, of any dtype that numpy knows or not."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # view(-1) would keep the odd stride of a single element
    return flat.view(torch.uint8).numpy().data
