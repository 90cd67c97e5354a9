"""Finds and reads the documents of a corpus, in an order that no file system and no place decides. Knows no tokens."""

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from scaling_slurm.errors import ConfigError

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""One document a line; every other file is one document."""


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    path: Path
    explicit: bool
    """Whether the user named this very file, or a folder above it."""


class Corpus:
    """The documents of files and folders: inputs as given, each folder's files sorted by their path below it.

    In folders, hidden names and links to folders are left out, `suffixes` says which files count (by default all) and
    `exclude` holds patterns for names or relative paths to leave out. A file that is found twice counts once.
    """

    def __init__(
        self,
        inputs: Sequence[Path],
        *,
        suffixes: Sequence[str] = (),
        exclude: Sequence[str] = (),
        key: str = "text",
        outside: Path | None = None,
    ) -> None:
        """`outside`: a folder that is not looked into, for it is written to meanwhile."""
        self._suffixes, self._exclude, self._key = tuple(suffixes), tuple(exclude), key
        self._outside = outside.resolve() if outside else None
        self.num_undecodable = 0
        """Files without UTF-8 text that the last pass left out."""
        self.num_empty = 0
        """Documents without any text that the last pass left out."""
        found: dict[tuple[int, int], Source] = {}
        for path in inputs:
            for identity, source in self._find(path):
                found.setdefault(identity, source)
        self.sources = list(found.values())
        if not self.sources:
            wanted = f" that end in {' or '.join(self._suffixes)}" if self._suffixes else ""
            raise ConfigError(
                f"there are no files{wanted} in {', '.join(map(str, inputs))}", "name files or folders with text"
            )

    def texts(self) -> Iterator[str]:
        """One pass over all documents that have any text; can be repeated."""
        self.num_undecodable = self.num_empty = 0
        for source in self.sources:
            try:
                texts = self._read_lines(source.path) if source.path.name.endswith(JSON_LINES) else self._read(source)
                for text in texts:
                    if text:
                        yield text
                    else:
                        self.num_empty += 1
            except OSError as error:
                raise ConfigError(f"{source.path} cannot be read: {error.strerror or error}") from None

    def left_out(self) -> str:
        """What the last pass left out, for people; empty: nothing."""
        counts = ((self.num_undecodable, "file that is", "files that are", " not UTF-8"),
                  (self.num_empty, "empty document", "empty documents", ""))  # fmt: skip
        return ", ".join(f"{count:,} {one if count == 1 else many}{rest}" for count, one, many, rest in counts if count)

    def _find(self, path: Path) -> Iterator[tuple[tuple[int, int], Source]]:
        if identity := _identity(path):
            yield identity, Source(path, explicit=True)
            return
        if not path.is_dir():
            raise ConfigError(f"there is no {path}", "inputs are files and folders that exist")
        relative_paths: list[str] = []
        for folder, folders, names in os.walk(path, onerror=_refuse):
            relative = Path(folder).relative_to(path)
            folders[:] = [
                name
                for name in folders
                if self._wanted(relative / name) and Path(folder, name).resolve() != self._outside
            ]
            relative_paths += [
                str(relative / name)
                for name in names
                if name.endswith(self._suffixes or "") and self._wanted(relative / name)
            ]
        for relative_path in sorted(relative_paths):
            if identity := _identity(path / relative_path):
                yield identity, Source(path / relative_path, explicit=False)

    def _wanted(self, relative: Path) -> bool:
        if relative.name.startswith("."):
            return False
        return not any(fnmatch(name, glob) for glob in self._exclude for name in (relative.name, relative.as_posix()))

    def _read(self, source: Source) -> Iterator[str]:
        try:
            text = source.path.read_bytes().decode()
        except UnicodeDecodeError as error:
            if source.explicit:
                raise ConfigError(
                    f"{source.path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}",
                    "convert it to UTF-8, or leave it out",
                ) from None
            self.num_undecodable += 1
            return
        yield text

    def _read_lines(self, path: Path) -> Iterator[str]:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number} is not JSON: {error}", "each line is one JSON object") from None
            text = record.get(self._key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                has = f"only {', '.join(record)}" if isinstance(record, dict) else f"no object but {line[:40]!r}"
                if isinstance(record, dict) and self._key in record:
                    has = f"{type(text).__name__} there"
                raise ConfigError(f"{path}:{number} has no text under {self._key!r}, {has}", "name the key", "--key")
            # JSON can spell half a surrogate pair, which no encoding can hold: it becomes U+FFFD.
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, the same under every name and link; None for what is no ordinary file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _refuse(error: OSError) -> None:
    raise ConfigError(f"{error.filename} cannot be read: {error.strerror}")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file that may be compressed; a compressed file that is cut off is an error."""
    import zstandard

    try:
        if path.name.endswith(".zst"):
            yield from _zstd_lines(path)
            return
        with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be decompressed: {error}", "it must be complete; copy it again") from None


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """All frames of a .zst file; the library's own readers end silently where a file is cut off."""
    import zstandard

    rest = b""
    frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    complete = True
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            while chunk:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                *lines, rest = (rest + frame.decompress(chunk)).split(b"\n")
                yield from lines
                chunk = frame.unused_data if frame.eof else b""
                complete = frame.eof
    if not complete:
        raise EOFError("it ends in the middle of a frame")
    if rest:
        yield rest
