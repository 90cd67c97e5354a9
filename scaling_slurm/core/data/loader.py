"""Cuts a dataset into this rank's micro-batches, step by step from any position. Knows the data axis, no other one.

All ranks together read each sample of a global batch once, however many ranks there are and however it is cut.
"""

import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.order import Indices
from scaling_slurm.core.tensor_parallel.cross_entropy import IGNORED
from scaling_slurm.errors import ConfigError


class DataTimeoutError(Exception):
    """The next step's data did not come in time; asking again goes on waiting."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass."""

    tokens: torch.Tensor
    """int64 [micro, sequence + 1]."""
    positions: torch.Tensor
    """int64 [micro], in the training order: counts consumed samples over all epochs."""
    samples: torch.Tensor
    """int64 [micro], the window of each row; -1 for a row that only fills up an evaluation batch."""

    @property
    def inputs(self) -> torch.Tensor:
        """[micro, sequence]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        """[micro, sequence]: the next token of each input, IGNORED throughout in rows that only fill up."""
        return self.tokens[:, 1:].masked_fill((self.samples < 0).unsqueeze(1), IGNORED)

    def to(self, device: torch.device) -> "MicroBatch":
        """On a device; from pinned memory without waiting."""
        return MicroBatch(*(x.to(device, non_blocking=True) for x in (self.tokens, self.positions, self.samples)))


def batch_rows(*, global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int) -> Indices:
    """Which rows of a global batch a rank takes: [accumulation, micro]; the accumulation index is outermost."""
    share = micro_batch_size * data_size
    assert global_batch_size % share == 0, (
        f"global batch {global_batch_size}, micro {micro_batch_size} x data {data_size}"
    )
    return np.arange(global_batch_size, dtype=np.int64).reshape(-1, data_size, micro_batch_size)[:, data_rank]


class DataLoader:
    """Reads ahead in one daemon thread. Its only state is its position: to resume is to start there."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        start_position: int,
        vocab_size: int | None = None,
        device: torch.device | None = None,
        prefetch_steps: int = 2,
    ) -> None:
        """`vocab_size`: rows of the embedding; a batch with an id beyond them is an error instead of a wild read.

        `device`: where the batches will go; for a CUDA device they lie in pinned memory.
        """
        self.dataset, self.vocab_size, self.device = dataset, vocab_size, device
        self._rows = batch_rows(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_rank=data_rank,
            data_size=data_size,
        )
        self._position, self._global_batch_size = start_position, global_batch_size
        self._queue: queue.Queue[list[MicroBatch] | BaseException] = queue.Queue(maxsize=prefetch_steps)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read_ahead, name="data-loader", daemon=True)
        self._thread.start()

    def next_step(self, timeout: float | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the next global step.

        Raises DataTimeoutError after `timeout` seconds without data, and whatever went wrong in reading.
        """
        if self._error is not None:
            raise self._error
        assert not self._closed.is_set(), "the loader is closed"
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise DataTimeoutError(f"no data from {self.dataset.file.prefix} within {timeout} s") from None
        if isinstance(item, BaseException):
            self._error = item
            raise item
        return item

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Global steps without end."""
        while True:
            yield self.next_step()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread; one that hangs in the file system is left behind, being a daemon."""
        self._closed.set()
        # Emptying makes room for the thread that waits in put(), which then sees that it is to end.
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        # Signals go to the main thread, whose waiting they interrupt. Faults stay with the thread that causes them.
        faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
        position = self._position
        try:
            if self.device is not None and self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread starts on device 0, whose memory is another rank's
            while not self._closed.is_set():
                positions = self._rows + position
                windows = self.dataset.windows(positions)
                self._queue.put(read_batches(self.dataset, positions, windows, self.vocab_size, self.device))
                position += self._global_batch_size
        except BaseException as error:
            self._queue.put(error)


def evaluation_batches(
    dataset: TokenDataset,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | None = None,
) -> Iterator[list[MicroBatch]]:
    """One pass over the first `max_samples` windows, or all, in their stored order; as many steps on all ranks.

    Rows beyond the last of them fill the last batch up: their sample is -1 and their targets are IGNORED, so that
    each window counts exactly once. A micro-batch may hold nothing but such rows.
    """
    rows = batch_rows(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
    )
    count = min(len(dataset), max_samples or len(dataset))
    for step in range(-(-count // global_batch_size)):
        positions = rows + step * global_batch_size
        windows = np.where(positions < count, positions, -1)
        yield read_batches(dataset, positions, windows, vocab_size, device)


def read_batches(
    dataset: TokenDataset, positions: Indices, windows: Indices, vocab_size: int | None, device: torch.device | None
) -> list[MicroBatch]:
    """Micro-batches of windows (both [accumulation, micro]); window -1 gives a row of zeros."""
    tokens = np.zeros((*windows.shape, dataset.sequence_length + 1), dtype=np.int64)
    for place in np.ndindex(windows.shape):
        if windows[place] >= 0:
            tokens[place] = dataset.window_tokens(int(windows[place]))
    if vocab_size is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ConfigError(
            f"{dataset.file.prefix} holds token ids {tokens.min()}..{tokens.max()}, but vocab_size is {vocab_size}",
            "vocab_size must be above the largest token id",
            "model.vocab_size or data in the run file",
        )
    arrays = [torch.from_numpy(array) for array in (tokens, positions, windows)]
    if device is not None and device.type == "cuda":
        arrays = [array.pin_memory() for array in arrays]
    return [MicroBatch(*parts) for parts in zip(*arrays, strict=True)]
