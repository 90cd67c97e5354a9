"""manifest.json: what a checkpoint holds and how to tell that it is whole. Knows no torch and opens no file.

A tensor's data is described by entries: an entry is a box of the full logical tensor, or a range of the box's elements
counted row by row, so that whole tensors, slices and flat optimizer shards are all said in one way. Format version 1.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from math import prod
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from scaling_slurm.errors import ScalingError

FORMAT_VERSION: Literal[1] = 1
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
Span = tuple[NonNegativeInt, NonNegativeInt]
"""[start, stop)."""
Box = tuple[Span, ...]
"""One span a dimension."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class CheckpointError(ScalingError):
    """A checkpoint that could not be written, or cannot be trusted."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """Size and digest of one file."""

    bytes: NonNegativeInt
    xxh3_128: Digest


class Entry(_Strict):
    """Where the data of one piece of one tensor lies."""

    name: str
    """Logical name of the parameter, such as layers.0.attention.query.weight."""
    kind: Kind
    shape: tuple[NonNegativeInt, ...]
    """Of the full logical tensor, without padding."""
    box: Box
    flat_range: Span | None = None
    """Elements of the box, counted row by row; None: all of them."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    file: FileName
    tensor: str
    """Key in the safetensors file."""
    offset: NonNegativeInt
    """Of the data's first byte in the file."""

    @property
    def key(self) -> str:
        """kind/name, by which the tensor is asked for."""
        return f"{self.kind}/{self.name}"

    @property
    def elements(self) -> Span:
        """The flat range, with None spelled out."""
        return self.flat_range or (0, volume(self.box))

    @property
    def num_bytes(self) -> int:
        start, stop = self.elements
        return (stop - start) * ITEM_BYTES[self.dtype]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if len(self.box) != len(self.shape):
            raise ValueError(f"{self.key}: box {self.box} does not have the dimensions of shape {self.shape}")
        if any(not start <= stop <= size for (start, stop), size in zip(self.box, self.shape, strict=True)):
            raise ValueError(f"{self.key}: box {self.box} is not inside shape {self.shape}")
        start, stop = self.elements
        if not start <= stop <= volume(self.box):
            raise ValueError(f"{self.key}: flat range {self.flat_range} is not inside box {self.box}")
        return self


class Manifest(_Strict):
    """The whole record. Written last: a directory without a valid one is no checkpoint."""

    format_version: Literal[1] = FORMAT_VERSION
    step: NonNegativeInt
    attempt: NonNegativeInt
    written_at: str
    """UTC, ISO 8601."""
    state: dict[str, Any]
    """The trainer's counters."""
    config: dict[str, Any]
    """The run's resolved settings."""
    layout: dict[Literal["tensor", "pipeline", "data"], int]
    data_fingerprint: str
    files: dict[FileName, FileRecord]
    entries: tuple[Entry, ...]

    @model_validator(mode="after")
    def _within_files(self) -> Self:
        for entry in self.entries:
            if entry.file not in self.files:
                raise ValueError(f"{entry.key} lies in {entry.file}, which is not among the files")
            if entry.offset + entry.num_bytes > self.files[entry.file].bytes:
                raise ValueError(f"{entry.key} lies beyond the end of {entry.file}")
        return self

    def by_key(self) -> dict[str, list[Entry]]:
        """The entries of each tensor, by kind/name."""
        return _by_key(self.entries)


def serialise(manifest: Manifest) -> str:
    """JSON with one entry a line and a digest over the rest; raises CheckpointError for what JSON cannot hold."""
    try:
        record = json.loads(json.dumps(manifest.model_dump(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"state or config of step {manifest.step} is not JSON: {error}") from error
    record["digest"] = _digest(record)
    lines = {key: json.dumps(value) for key, value in record.items()}
    lines["entries"] = "[\n  " + ",\n  ".join(map(json.dumps, record["entries"])) + "\n ]"
    return "{\n " + ",\n ".join(f'"{key}": {line}' for key, line in lines.items()) + "\n}\n"


def parse(text: bytes) -> Manifest:
    """The manifest in a file's bytes; raises CheckpointError when it is torn, altered or of an unknown version."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"manifest is torn: {error}") from error
    if not isinstance(record, dict):
        raise CheckpointError("manifest is not a JSON object")
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"format version {version!r} is unknown", f"this program reads version {FORMAT_VERSION}")
    digest = record.pop("digest", None)
    if digest != _digest(record):
        raise CheckpointError("manifest does not match its own digest")
    try:
        return Manifest.model_validate_json(json.dumps(record))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"manifest is not valid: {place}: {first['msg']}") from error


def _digest(record: dict[str, Any]) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode()).hexdigest()


def _by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    tensors: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        tensors[entry.key].append(entry)
    return dict(tensors)


def sizes(box: Box) -> tuple[int, ...]:
    """Extent of each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return prod(sizes(box))


def intersect(first: Box, second: Box) -> Box | None:
    """The common box, or None when no element is common."""
    spans = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return spans if all(start < stop for start, stop in spans) else None


def cut(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a box, counted row by row, as boxes in that order: each is contiguous in the range."""
    if start >= stop:
        return
    if (start, stop) == (0, volume(box)):
        yield box
        return
    origin, row = box[0][0], volume(box[1:])
    first, last = start // row, stop // row
    if start % row:
        for inner in cut(box[1:], start % row, min(row, stop - first * row)):
            yield ((origin + first, origin + first + 1), *inner)
        first += 1
    if first < last:
        yield ((origin + first, origin + last), *box[1:])
    if first <= last:
        for inner in cut(box[1:], 0, stop - last * row):
            yield ((origin + last, origin + last + 1), *inner)


def coverage_problems(entries: Iterable[Entry]) -> list[str]:
    """What keeps the entries from holding every element of every tensor exactly once."""
    problems = []
    for key, pieces in _by_key(entries).items():
        if len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
            problems.append(f"{key} has entries of several shapes or dtypes")
            continue
        ranges: dict[Box, list[Span]] = defaultdict(list)
        for piece in pieces:
            ranges[piece.box].append(piece.elements)
        joined = {box: _join(spans) for box, spans in ranges.items()}
        boxes = [part for box, spans in joined.items() for span in spans for part in cut(box, *span)]
        total, held = prod(pieces[0].shape), sum(map(volume, boxes))
        if any(intersect(one, other) is not None for one, other in combinations(boxes, 2)):
            problems.append(f"{key} has elements that are held twice")
        elif held != total:
            problems.append(f"{key} has {held} of its {total} elements")
    return problems


def _join(spans: list[Span]) -> list[Span]:
    """Neighbouring ranges made one; overlapping ones stay apart, so that they are found as such."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
