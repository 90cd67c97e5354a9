"""Which samples each rank gets at each step: exact seek, any cut of the batch, epoch boundaries, resumes, stalls."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.loader import DataLoader, DataTimeoutError, MicroBatch, evaluation_batches
from scaling_slurm.core.data.token_file import TokenFileWriter
from scaling_slurm.core.tensor_parallel.cross_entropy import IGNORED
from scaling_slurm.errors import ConfigError

GLOBAL_BATCH = 12
WINDOWS = 30
CUTS = [(1, 12), (1, 3), (1, 1), (2, 3), (3, 2), (4, 1), (4, 3), (12, 1)]
"""(data size, micro-batch size)"""


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """30 windows of 4 + 1 tokens; window w starts with id 4 w. Two and a half steps are an epoch."""
    with TokenFileWriter(tmp_path / "train", np.uint16) as writer:
        writer.add_document(list(range(WINDOWS * 4 + 1)))
    return TokenDataset(tmp_path / "train", 4, seed=3)


def load(
    dataset: TokenDataset, first: int, steps: int, size: int = 1, micro: int = 1, rank: int = 0
) -> list[list[MicroBatch]]:
    with DataLoader(
        dataset,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro,
        data_rank=rank,
        data_size=size,
        start_position=first * GLOBAL_BATCH,
    ) as loader:
        return [loader.next_step(timeout=30) for _ in range(steps)]


def rows(step: list[MicroBatch]) -> list[tuple[int, int, list[int]]]:
    """(position, window, ids) of each row."""
    return [
        (int(position), int(window), tokens.tolist())
        for batch in step
        for position, window, tokens in zip(batch.positions, batch.samples, batch.tokens, strict=True)
    ]


def test_rows_are_dealt_with_the_accumulation_index_outermost(dataset: TokenDataset) -> None:
    """k = a * (D * M) + d * M + b, here D = 2, M = 3, rank 1, step 1."""
    (step,) = load(dataset, 1, 1, size=2, micro=3, rank=1)
    assert [batch.positions.tolist() for batch in step] == [[15, 16, 17], [21, 22, 23]]
    assert [batch.tokens.shape for batch in step] == [(3, 5), (3, 5)]
    assert {batch.tokens.dtype for batch in step} == {batch.samples.dtype for batch in step} == {torch.int64}


def test_rows_hold_what_the_dataset_says(dataset: TokenDataset) -> None:
    for step in load(dataset, 0, 6, micro=4):
        for position, window, tokens in rows(step):
            assert tokens == dataset.sample(position).tolist()
            assert tokens == list(range(4 * window, 4 * window + 5))


def test_targets_are_the_next_tokens(dataset: TokenDataset) -> None:
    batch = load(dataset, 0, 1)[0][0]
    assert (batch.inputs + 1).tolist() == batch.targets.tolist()
    assert batch.targets.shape == (1, 4)


@pytest.mark.parametrize(("size", "micro"), CUTS)
def test_any_cut_covers_the_same_samples_of_each_step(dataset: TokenDataset, size: int, micro: int) -> None:
    whole = [sorted(rows(step)) for step in load(dataset, 0, 4)]
    shares = [load(dataset, 0, 4, size=size, micro=micro, rank=rank) for rank in range(size)]
    assert [sorted(row for share in shares for row in rows(share[step])) for step in range(4)] == whole
    assert {len(step) for share in shares for step in share} == {GLOBAL_BATCH // size // micro}
    assert [position for step in whole for position, _, _ in step] == list(range(4 * GLOBAL_BATCH))


def test_epochs_cross_steps_and_each_takes_every_window_once(dataset: TokenDataset) -> None:
    windows = [window for step in load(dataset, 0, 5) for _, window, _ in rows(step)]
    assert sorted(windows[:WINDOWS]) == sorted(windows[WINDOWS : 2 * WINDOWS]) == list(range(WINDOWS))
    assert windows[:WINDOWS] != windows[WINDOWS : 2 * WINDOWS]


@pytest.mark.parametrize("first", range(9))
def test_seek_equals_replay_also_on_another_cut_and_a_second_time(dataset: TokenDataset, first: int) -> None:
    replay = [sorted(rows(step)) for step in load(dataset, 0, 12)]
    assert [sorted(rows(step)) for step in load(dataset, first, 2, micro=4)] == replay[first : first + 2]
    assert [sorted(rows(step)) for step in load(dataset, first + 2, 1, micro=2)] == replay[first + 2 : first + 3]


def test_how_far_it_reads_ahead_changes_nothing(dataset: TokenDataset) -> None:
    expected = [batch.positions.tolist() for batch in load(dataset, 3, 1)[0]]
    for prefetch in (1, 3):
        with DataLoader(
            dataset,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=1,
            data_rank=0,
            data_size=1,
            start_position=3 * GLOBAL_BATCH,
            prefetch_steps=prefetch,
        ) as loader:
            assert [batch.positions.tolist() for batch in loader.next_step(timeout=30)] == expected


def test_reading_leaves_the_global_generators_alone(dataset: TokenDataset) -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    load(dataset, 0, 3)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_for_cuda_are_pinned(dataset: TokenDataset) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with start(dataset, device=device) as loader:
        batch = loader.next_step(timeout=60)[0]
        assert batch.tokens.is_pinned()
        moved = batch.to(device)
        assert moved.tokens.device == device
        assert moved.targets.tolist() == batch.targets.tolist()


def test_far_seek_is_immediate(dataset: TokenDataset) -> None:
    (step,) = load(dataset, 10**12, 1)
    assert rows(step)[0][0] == 10**12 * GLOBAL_BATCH


def test_iteration_gives_the_steps_in_order(dataset: TokenDataset) -> None:
    with DataLoader(
        dataset, global_batch_size=2, micro_batch_size=2, data_rank=0, data_size=1, start_position=7
    ) as loader:
        positions = [step[0].positions.tolist() for _, step in zip(range(3), loader, strict=False)]
    assert positions == [[7, 8], [9, 10], [11, 12]]


class Gate:
    """Stands before a dataset's reads: lets them through once it is open."""

    def __init__(self, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        read = dataset.window_tokens

        def wait_and_read(window: int) -> np.ndarray:
            self.open.wait(30)
            return read(window)

        monkeypatch.setattr(dataset, "window_tokens", wait_and_read)


def start(dataset: TokenDataset, **kwargs: Any) -> DataLoader:
    return DataLoader(
        dataset, global_batch_size=2, micro_batch_size=1, data_rank=0, data_size=1, start_position=0, **kwargs
    )


def test_a_stall_times_out_and_loses_nothing(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(dataset, monkeypatch)
    with start(dataset) as loader:
        for _ in range(2):
            with pytest.raises(DataTimeoutError, match=r"train within 0\.01 s"):
                loader.next_step(timeout=0.01)
        gate.open.set()
        assert [batch.positions.tolist() for batch in loader.next_step(timeout=30)] == [[0], [1]]


def test_signals_interrupt_the_wait_and_never_reach_the_thread(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, handled_by = Gate(dataset, monkeypatch), []

    def handle(*_: object) -> None:
        handled_by.append(threading.current_thread())
        raise InterruptedError

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with start(dataset) as loader:
            while loader._thread.native_id is None:
                time.sleep(0.001)
            mask = int(
                next(
                    line.split()[1]
                    for line in Path(f"/proc/self/task/{loader._thread.native_id}/status").read_text().splitlines()
                    if line.startswith("SigBlk")
                ),
                16,
            )
            assert mask >> (signal.SIGUSR1 - 1) & 1
            assert mask >> (signal.SIGTERM - 1) & 1
            assert not mask >> (signal.SIGSEGV - 1) & 1
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            began = time.monotonic()
            with pytest.raises(InterruptedError):
                loader.next_step(timeout=20)
            assert time.monotonic() - began < 5
            assert handled_by == [threading.main_thread()]
            gate.open.set()
            assert len(loader.next_step(timeout=30)) == 2
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_an_error_of_the_thread_reaches_the_caller_every_time(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(window: int) -> np.ndarray:
        raise OSError(f"window {window} is gone")

    monkeypatch.setattr(dataset, "window_tokens", fail)
    with start(dataset) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match="is gone"):
                loader.next_step(timeout=30)


@pytest.mark.parametrize("consumed", [0, 1])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_close_ends_the_thread(dataset: TokenDataset, prefetch: int, consumed: int) -> None:
    loader = start(dataset, prefetch_steps=prefetch)
    for _ in range(consumed):
        loader.next_step(timeout=30)
    loader.close()
    assert not loader._thread.is_alive()


def test_ids_beyond_the_embedding_are_refused(dataset: TokenDataset) -> None:
    with start(dataset, vocab_size=121) as loader:
        for _ in range(30):
            loader.next_step(timeout=30)
    with (
        start(dataset, vocab_size=120) as loader,
        pytest.raises(ConfigError, match=r"ids \d+\.\.120, but vocab_size is 120"),
    ):
        list(loader)


def evaluate(
    dataset: TokenDataset, batch: int, micro: int, size: int, samples: int | None = None
) -> list[list[list[MicroBatch]]]:
    """[rank][step]"""
    return [
        list(
            evaluation_batches(
                dataset,
                global_batch_size=batch,
                micro_batch_size=micro,
                data_rank=rank,
                data_size=size,
                max_samples=samples,
            )
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(("batch", "steps"), [(12, 3), (60, 1), (30, 1), (28, 2)])
@pytest.mark.parametrize(("size", "micro"), [(1, 1), (2, 2), (4, 1)])
def test_evaluation_counts_each_window_once_on_any_cut(
    dataset: TokenDataset, batch: int, steps: int, size: int, micro: int
) -> None:
    if batch % (size * micro):
        batch += 2
    ranks = evaluate(dataset, batch, micro, size)
    assert [[len(step) for step in rank] for rank in ranks] == [[batch // size // micro] * steps] * size
    batches = [each for rank in ranks for step in rank for each in step]
    targets = torch.cat([each.targets for each in batches])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, WINDOWS * 4 + 1))
    windows = torch.cat([each.samples for each in batches])
    assert sorted(windows[windows >= 0].tolist()) == list(range(WINDOWS))
    assert (targets[windows < 0] == IGNORED).all()
    assert all((each.inputs >= 0).all() for each in batches)


def test_evaluation_takes_the_same_samples_whatever_the_batch(dataset: TokenDataset) -> None:
    for batch in (2, 4, 8):
        (steps,) = evaluate(dataset, batch, batch, 1, samples=6)
        windows = [window for (micro,) in steps for window in micro.samples.tolist() if window >= 0]
        assert windows == list(range(6))
