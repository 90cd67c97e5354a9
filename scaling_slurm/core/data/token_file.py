"""Token files in Megatron-LM's indexed format: PREFIX.bin holds raw ids, PREFIX.idx their type and where documents end.

Knows nothing of tokenizers, samples or order.
"""

import os
import struct
import weakref
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from scaling_slurm.errors import ConfigError
from scaling_slurm.run_directory import sync_directory, temporary_beside

Tokens = npt.NDArray[Any]
"""Token ids in the integer type of their file."""

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version (1), type code, number of sequences, number of document boundaries (documents + 1)."""
TYPE_CODES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def files_of(prefix: Path | str) -> tuple[Path, Path]:
    """The .bin and the .idx of a prefix, which may itself hold dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def choose_dtype(largest_id: int) -> type[np.integer[Any]]:
    """The smallest type for every id of a vocabulary, added tokens included."""
    if largest_id <= np.iinfo(np.uint16).max:
        return np.uint16
    if largest_id <= np.iinfo(np.int32).max:
        return np.int32
    raise ConfigError(f"token id {largest_id} is too large", f"token files hold ids up to {np.iinfo(np.int32).max}")


class TokenFile:
    """A finished pair of files, open for reading; safe to share between threads.

    The index is mapped into memory. Tokens are read by pread, not by mmap: that lets go of the interpreter's lock while
    a parallel file system is slow, and a file that shrinks meanwhile is an error instead of a SIGBUS.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self.bin_file, self.idx_file = files_of(prefix)
        for file in (self.bin_file, self.idx_file):
            if not file.is_file():
                raise ConfigError(
                    f"there is no {file}",
                    f"{prefix} must be the prefix of a .bin and an .idx file",
                    "run `scaling prepare`",
                )
        self._read_index()
        expected = int(self._pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0
        size = self.bin_file.stat().st_size
        if size != expected:
            raise ConfigError(
                f"{self.bin_file} has {size} bytes, but {self.idx_file} describes {expected}",
                "the two files must be of one set, and complete",
                "copy or prepare them again",
            )
        self.num_tokens = size // self.dtype.itemsize
        self._descriptor = os.open(self.bin_file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def _read_index(self) -> None:
        size = self.idx_file.stat().st_size
        with open(self.idx_file, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ConfigError(f"{self.idx_file} ({size} bytes) is not an index of Megatron-LM's indexed format")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        if version != 1 or code not in TYPE_CODES:
            raise ConfigError(
                f"{self.idx_file} has version {version} and type code {code}",
                f"version 1 and an integer type (codes {sorted(TYPE_CODES)}) can be read",
            )
        expected = HEADER.size + num_sequences * (4 + 8) + num_boundaries * 8
        if size < expected or num_boundaries < 1:
            raise ConfigError(
                f"{self.idx_file} has {size} bytes, but its header ({num_sequences} sequences, "
                f"{num_boundaries} document boundaries) asks for {expected}",
                "the file is cut off or damaged",
                "copy or prepare it again",
            )
        content = np.memmap(self.idx_file, mode="r", dtype=np.uint8)
        self.dtype = np.dtype(TYPE_CODES[code]).newbyteorder("<")
        lengths_end, pointers_end = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
        self.lengths = content[HEADER.size : lengths_end].view("<i4")
        self._pointers = content[lengths_end:pointers_end].view("<i8")
        self._boundaries = content[pointers_end:expected].view("<i8")
        if int(self._boundaries[-1]) != num_sequences or (num_sequences and int(self._pointers[0]) != 0):
            raise ConfigError(
                f"{self.idx_file} is damaged: its documents end at sequence {self._boundaries[-1]} of {num_sequences}",
                where="copy or prepare it again",
            )

    @property
    def num_documents(self) -> int:
        return len(self._boundaries) - 1

    def tokens(self, start: int, stop: int) -> Tokens:
        """Ids [start, stop) of all documents one after the other, as a fresh array in the file's own type."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.bin_file}")
        result = np.empty(stop - start, dtype=self.dtype)
        view, done = result.view(np.uint8).data, 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], start * self.dtype.itemsize + done)
            if count == 0:
                raise ConfigError(
                    f"{self.bin_file} has become shorter than its {self.num_tokens} tokens", "prepare it again"
                )
            done += count
        return result

    def document(self, index: int) -> Tokens:
        """All ids of one document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.prefix}")
        first, last = int(self._boundaries[index]), int(self._boundaries[index + 1])
        if first == last:
            return np.empty(0, dtype=self.dtype)
        start = int(self._pointers[first]) // self.dtype.itemsize
        stop = int(self._pointers[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        return self.tokens(start, stop)


class TokenFileWriter:
    """Writes a pair under temporary names; leaving the `with` block without an error puts it in place."""

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike, *, overwrite: bool = False) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, kind in TYPE_CODES.items() if np.dtype(kind) == np.dtype(dtype))
        self.bin_file, self.idx_file = files_of(prefix)
        if not overwrite and (existing := [file for file in (self.bin_file, self.idx_file) if file.exists()]):
            raise ConfigError(f"{existing[0]} exists already", "choose another place, or ask to overwrite it")
        self._temporary_bin, self._temporary_idx = temporary_beside(self.bin_file), temporary_beside(self.idx_file)
        self._lengths = array("i")
        self.num_tokens = 0
        self.largest_token = -1

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def __enter__(self) -> Self:
        self._file: IO[bytes] = open(self._temporary_bin, "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    _sync(self._file)
            if kind is None:
                self._write_index()
                # Without an .idx there is no pair: a crash between the two renames cannot mix an old and a new file.
                self.idx_file.unlink(missing_ok=True)
                os.replace(self._temporary_bin, self.bin_file)
                os.replace(self._temporary_idx, self.idx_file)
                sync_directory(self.bin_file.parent)
        finally:
            self._temporary_bin.unlink(missing_ok=True)
            self._temporary_idx.unlink(missing_ok=True)

    def add_document(self, ids: npt.ArrayLike) -> None:
        """Append one document; raises ConfigError when an id does not fit the type, and then writes nothing of it."""
        values = np.asarray(ids)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise TypeError(f"a document is a flat list of integers, not {values.dtype} of shape {values.shape}")
        if values.size:
            smallest, largest = int(values.min()), int(values.max())
            if smallest < 0 or largest > np.iinfo(self.dtype).max:
                raise ConfigError(
                    f"token ids {smallest}..{largest} do not fit {self.dtype.name}",
                    f"ids must be in 0..{np.iinfo(self.dtype).max}",
                )
            self.largest_token = max(self.largest_token, largest)
        self._lengths.append(values.size)
        self._file.write(values.astype(self.dtype).tobytes())
        self.num_tokens += values.size

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32).astype("<i4")
        ends = np.cumsum(lengths, dtype=np.int64)
        count = len(lengths)
        with open(self._temporary_idx, "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, count, count + 1))
            file.write(lengths.tobytes())
            file.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
