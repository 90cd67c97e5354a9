"""Random numbers without state: every number is a hash of a key and of its place in a full tensor.

They depend on no layout, no rank, no order of calls, and there is nothing to save. Knows no parameters and no layers.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import xxhash

CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 20
"""Elements drawn at once: what stays in a core's cache, and what fills a GPU within some tens of MiB."""


def key(*parts: int | str) -> int:
    """A 64-bit hash of the parts (0 <= key < 2^64), the same on every machine; (1, "2"), ("1", 2), ("12",) differ."""
    text = "".join(f"{'str' if isinstance(part, str) else 'int'}{len(str(part))}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode())


def uniform(
    key: int,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Numbers from (low, high) for the box of `sizes` at `offsets` of a full tensor of `shape`; by default all of it.

    A box drawn alone equals the same box of the full tensor to the last bit. Drawn in float64, then rounded to dtype
    (which may then hit an end).
    """
    output = torch.empty(tuple(shape if sizes is None else sizes), device=device, dtype=dtype)
    for piece, numbers in _pieces(key, shape, offsets, output):
        piece.copy_(numbers.mul_(high - low).add_(low))
    return output


def normal(
    key: int,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    std: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """Normally distributed numbers; a box as for `uniform`.

    By inversion (the normal quantile of one uniform number): torch computes it element by element with the same scalar
    code wherever the element lies, which vectorised logarithms and cosines with their tails do not promise.
    """
    output = torch.empty(tuple(shape if sizes is None else sizes), device=device, dtype=dtype)
    for piece, numbers in _pieces(key, shape, offsets, output):
        piece.copy_(torch.special.ndtri(numbers).mul_(std).add_(mean))
    return output


def keep_mask(
    key: int | torch.Tensor, positions: torch.Tensor, shape: Sequence[int], keep_probability: float
) -> torch.Tensor:
    """True with `keep_probability`, for each element of samples of `shape`; [batch] int64 -> [batch, *shape] bool.

    An element's value depends on the key (64 bits, or an int64 scalar tensor), its sample's position in the training
    order and its index in the sample, not on the samples around it. The probability is rounded to a multiple of 2^-32.
    """
    assert 0.0 < keep_probability <= 1.0, keep_probability
    *leading, columns = shape if len(shape) else (1,)
    rows = math.prod(leading)
    if isinstance(key, int):
        key = signed(key)
    sample_keys = _mix64_(_mix64_(positions.clone()) ^ key)
    row_keys = _scatter(sample_keys[:, None], torch.arange(rows, device=positions.device))  # [batch, rows]
    low, high = row_keys.to(torch.int32)[..., None], (row_keys >> 32).to(torch.int32)[..., None]
    column = torch.arange(columns, device=positions.device, dtype=torch.int32)
    bits = _mix32_(_mix32_(column ^ low).bitwise_xor_(high))  # [batch, rows, columns]
    threshold = max(1, round(keep_probability * 2**32)) - 2**31  # bits are uniform on [-2^31, 2^31)
    return (bits <= threshold - 1).reshape(-1, *shape)


def signed(value: int) -> int:
    """The int64 with the same bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def _scatter(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One 64-bit hash for each pair. The index is not multiplied before it meets a key: torch.compile would take
    index * constant for the address arithmetic of dynamic shapes, where it does not wrap around."""
    return _mix64_((keys ^ index).mul_(_GOLDEN))


def _mix64_(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64, in place, that spreads each bit over all: the output function of SplitMix
    (https://doi.org/10.1145/2714064.2660195). Shifts of torch are arithmetic: the masks make them logical."""
    x ^= (x >> 30).bitwise_and_(0x3FFFFFFFF)
    x *= signed(0xBF58476D1CE4E5B9)
    x ^= (x >> 27).bitwise_and_(0x1FFFFFFFFF)
    x *= signed(0x94D049BB133111EB)
    x ^= (x >> 31).bitwise_and_(0x1FFFFFFFF)
    return x


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """The same for int32, which is what a processor's vectors multiply fast, and in place; the multipliers leave a bias
    below 0.2 per mille between any input and output bit (https://nullprogram.com/blog/2018/07/31/)."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _pieces(
    key: int, shape: Sequence[int], offsets: Sequence[int] | None, output: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of the output, each with its float64 uniform numbers; the parts bound the memory that drawing takes."""
    offsets = [0] * len(shape) if offsets is None else offsets
    boxes = list(zip(offsets, output.shape, shape, strict=True))
    assert all(offset >= 0 and offset + size <= full for offset, size, full in boxes), (shape, offsets, output.shape)
    if output.numel() == 0:
        return
    device = output.device
    columns = output.shape[-1] if output.dim() else 1
    table = output.view(-1, columns)
    chunk = GPU_CHUNK if device.type == "cuda" else CPU_CHUNK
    width, height = min(columns, chunk), max(1, chunk // columns)
    first_column = offsets[-1] if len(offsets) else 0
    for row in range(0, table.shape[0], height):
        rows = torch.arange(row, min(row + height, table.shape[0]), device=device)
        row_keys = _mix64_(_mix64_(_full_rows(rows, boxes[:-1])) ^ signed(key))[:, None]
        for column in range(0, columns, width):
            stop = min(column + width, columns)
            index = torch.arange(first_column + column, first_column + stop, device=device)
            bits = _scatter(row_keys, index)  # [rows, columns of the piece]
            numbers = (bits >> 11).bitwise_and_(2**53 - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)
            yield table[row : row + len(rows), column:stop], numbers


def _full_rows(rows: torch.Tensor, boxes: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Row numbers of a box (offset, size, full size of each leading dimension) as row numbers of the full tensor."""
    full, stride = torch.zeros_like(rows), 1
    for offset, size, full_size in reversed(boxes):
        full += (rows % size + offset) * stride
        rows = rows // size
        stride *= full_size
    return full
