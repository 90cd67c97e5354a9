"""Fixed-length samples over a token file, in an order keyed by seed and epoch. Knows no ranks, batches or torch."""

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from scaling_slurm.core.data.order import Indices, order_key, permute_many
from scaling_slurm.core.data.token_file import TokenFile
from scaling_slurm.errors import ConfigError

_BLOCK = 1 << 16
_BLOCKS = 64


class TokenDataset:
    """Window w holds tokens [w * sequence_length, (w + 1) * sequence_length + 1) of the concatenated documents.

    The last token of a window is the first of the next one: each is predicted once. What is left behind the last
    whole window is not used. Epoch e takes all windows in the permutation of (seed, e); positions count on over epochs.
    """

    def __init__(self, prefix: Path | str, sequence_length: int, seed: int) -> None:
        self.file = TokenFile(prefix)
        self.sequence_length, self.seed = sequence_length, seed
        self.num_windows = (self.file.num_tokens - 1) // sequence_length
        if self.num_windows < 1:
            raise ConfigError(
                f"{prefix} has {self.file.num_tokens} tokens, fewer than one window of {sequence_length + 1}",
                "more text, or a model.sequence_length below the number of tokens",
                "data and model.sequence_length in the run file",
            )

    def __len__(self) -> int:
        return self.num_windows

    def windows(self, positions: Indices) -> Indices:
        """The window at each position of the training order (any shape)."""
        epochs, indices = np.divmod(positions, self.num_windows)
        result = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = order_key("samples", self.seed, int(epoch))
            result[chosen] = permute_many(indices[chosen], self.num_windows, key)
        return result

    def window_tokens(self, window: int) -> npt.NDArray[np.int64]:
        """The ids of one window: [sequence_length + 1]."""
        start = window * self.sequence_length
        return self.file.tokens(start, start + self.sequence_length + 1).astype(np.int64)

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The ids at a position of the training order: [sequence_length + 1]."""
        return self.window_tokens(int(self.windows(np.array([position], dtype=np.int64))[0]))

    def fingerprint(self) -> str:
        """Identity of the content, wherever it lies: xxh3-128 over sizes and up to 64 blocks spread over each file."""
        digest = xxhash.xxh3_128()
        for path in (self.file.idx_file, self.file.bin_file):
            size = path.stat().st_size
            digest.update(str(size).encode() + b"\n")
            last = max(size - _BLOCK, 0)
            with open(path, "rb") as file:
                for offset in sorted({last * n // (_BLOCKS - 1) for n in range(_BLOCKS)}):
                    digest.update(os.pread(file.fileno(), _BLOCK, offset))
        return digest.hexdigest()

    def largest_token(self) -> int:
        """The largest id: from the data.json that was written with the file, else by reading all tokens."""
        try:
            record = json.loads(self.file.prefix.with_name("data.json").read_text())["files"][self.file.prefix.name]
            if record["tokens"] == self.file.num_tokens:
                return int(record["largest_token_id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # token files from elsewhere have no such record
        step = 1 << 24
        starts = range(0, self.file.num_tokens, step)
        return max(int(self.file.tokens(start, min(start + step, self.file.num_tokens)).max()) for start in starts)
