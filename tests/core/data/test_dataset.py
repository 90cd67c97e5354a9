"""Windows of a small token file whose ids tell where they stand."""

import json
from pathlib import Path

import numpy as np
import pytest

from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.order import order_key, permute
from scaling_slurm.core.data.token_file import TokenFileWriter
from scaling_slurm.errors import ConfigError


def write(prefix: Path, *documents: list[int]) -> Path:
    with TokenFileWriter(prefix, np.uint16, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """105 tokens, 0..104, over three documents."""
    return write(tmp_path / "train", list(range(7)), list(range(7, 50)), list(range(50, 105)))


def test_golden_table_of_windows(prefix: Path) -> None:
    """The last token of a window starts the next one, so that each token but the first is a target exactly once."""
    dataset = TokenDataset(prefix, 4, seed=0)
    assert len(dataset) == 26
    assert dataset.window_tokens(0).tolist() == [0, 1, 2, 3, 4]
    assert dataset.window_tokens(1).tolist() == [4, 5, 6, 7, 8]
    assert dataset.window_tokens(25).tolist() == [100, 101, 102, 103, 104]
    targets = np.concatenate([dataset.window_tokens(window)[1:] for window in range(26)])
    assert targets.tolist() == list(range(1, 105))


@pytest.mark.parametrize(("sequence_length", "windows"), [(104, 1), (103, 1), (52, 2), (51, 2), (53, 1)])
def test_number_of_windows_at_the_edges(prefix: Path, sequence_length: int, windows: int) -> None:
    assert len(TokenDataset(prefix, sequence_length, seed=0)) == windows


@pytest.mark.parametrize("sequence_length", [105, 1000])
def test_fewer_tokens_than_a_window(prefix: Path, sequence_length: int) -> None:
    with pytest.raises(ConfigError, match=f"has 105 tokens, fewer than one window of {sequence_length + 1}"):
        TokenDataset(prefix, sequence_length, seed=0)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 tokens"):
        TokenDataset(write(tmp_path / "x", []), 4, seed=0)


def test_each_epoch_is_another_permutation_of_all_windows(prefix: Path) -> None:
    dataset = TokenDataset(prefix, 4, seed=5)
    epochs = dataset.windows(np.arange(4 * 26)).reshape(4, 26)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(26))] * 4
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert epochs[2, 7] == permute(7, 26, order_key("samples", 5, 2))
    assert dataset.sample(2 * 26 + 7).tolist() == dataset.window_tokens(int(epochs[2, 7])).tolist()
    assert TokenDataset(prefix, 4, seed=6).windows(np.arange(26)).tolist() != epochs[0].tolist()


def test_drawing_samples_leaves_the_global_generator_alone(prefix: Path) -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    TokenDataset(prefix, 4, seed=0).sample(3)
    assert np.random.get_state()[1].tolist() == before


def test_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    tokens = np.arange(3_000_000) % 5000
    dataset = TokenDataset(write(tmp_path / "a", tokens.tolist()), 4, seed=0)
    assert len(dataset.fingerprint()) == 32
    assert TokenDataset(write(tmp_path / "b", tokens.tolist()), 8, seed=9).fingerprint() == dataset.fingerprint()
    tokens[-1] += 1
    assert TokenDataset(write(tmp_path / "c", tokens.tolist()), 4, seed=0).fingerprint() != dataset.fingerprint()
    assert TokenDataset(write(tmp_path / "d", [*tokens[:-2].tolist(), 1]), 4, 0).fingerprint() != dataset.fingerprint()
    # Other document boundaries over the same tokens
    cut = TokenDataset(write(tmp_path / "e", tokens[:10].tolist(), tokens[10:].tolist()), 4, seed=0)
    assert cut.fingerprint() != TokenDataset(tmp_path / "c", 4, seed=0).fingerprint()


def test_largest_token_is_found_or_looked_up(prefix: Path) -> None:
    dataset = TokenDataset(prefix, 4, seed=0)
    assert dataset.largest_token() == 104
    record = prefix.with_name("data.json")
    record.write_text(json.dumps({"files": {"train": {"tokens": 105, "largest_token_id": 777}}}))
    assert dataset.largest_token() == 777
    record.write_text(json.dumps({"files": {"train": {"tokens": 99, "largest_token_id": 777}}}))  # of another file
    assert dataset.largest_token() == 104
