import pytest
import torch
from torch import nn

from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.model.embedding import Embedding
from tests.support.language_model import bound_model, random_tokens, small_config


def embed(dropout: float, positions: list[int], *, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the rows of the matrix."""
    config = small_config(embedding_dropout=dropout)
    embedding = bound_model(config).train(training).get_submodule("embedding")
    assert isinstance(embedding, Embedding)
    tokens = random_tokens(2, 24, config=config)
    hidden = embedding(Inputs(tokens, torch.tensor(positions))).hidden
    return hidden, nn.functional.one_hot(tokens, config.vocab_size).double() @ embedding.weight


@pytest.mark.parametrize(("dropout", "training"), [(0.0, True), (0.25, False)])
def test_rows_of_the_matrix(dropout: float, training: bool) -> None:
    hidden, rows = embed(dropout, [0, 1], training=training)
    assert torch.equal(hidden, rows)


def test_dropout_follows_the_positions() -> None:
    hidden, rows = embed(0.25, [5, 9], training=True)
    kept = hidden != 0
    assert torch.allclose(hidden[kept], rows[kept] / 0.75, rtol=1e-14, atol=0)
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.05)
    swapped, _ = embed(0.25, [9, 5], training=True)
    assert torch.equal(swapped != 0, kept.flip(0))
    assert not torch.equal(kept[0], kept[1])
