import math

import pytest
import torch

from scaling_slurm.transformer.model.rotary import Rotary
from tests.support.language_model import small_config


def rotary(**changes: object) -> Rotary:
    module = Rotary(small_config(hidden_size=32, num_attention_heads=4, **changes))
    module.reset_buffers()
    return module


def test_turns_each_pair_by_position_times_frequency() -> None:
    x = torch.zeros(1, 1, 24, 8, dtype=torch.float64)
    x[..., 1] = 1.0  # dim 1 is paired with dim 1 + 4
    turned = rotary(rotary_base=100.0)(x, x)[0][0, 0]
    for position in (0, 1, 7, 23):
        angle = position * 100.0 ** (-2 / 8)
        expected = [0.0] * 8
        expected[1], expected[5] = math.cos(angle), math.sin(angle)
        assert turned[position].tolist() == pytest.approx(expected, abs=1e-7)


def test_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    turn = rotary()
    queries, keys = turn(query.expand(1, 1, 24, 8), key.expand(1, 1, 24, 8))
    scores = queries[0, 0] @ keys[0, 0].T
    for distance in range(-23, 24):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-6
    assert (scores[0, 0] - scores[0, 1]).abs() > 1e-3


def test_starts_where_it_is_told() -> None:
    turn = rotary()
    x = torch.randn(2, 3, 24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, part = turn(x, x[:, :1]), turn(x[:, :, 11:15], x[:, :1, 11:15], start=11)
    assert torch.equal(whole[0][:, :, 11:15], part[0])
    assert torch.equal(whole[1][:, :, 11:15], part[1])


def test_tables_are_exact_far_out() -> None:
    """Angles in float32 would be off by 1e-3 at position 20000."""
    turn = rotary(sequence_length=20001)
    assert turn.cosine.dtype == torch.float32
    angles = [20000 * 10000.0 ** (-2 * pair / 8) for pair in range(4)]
    assert turn.cosine[20000].tolist() == pytest.approx([math.cos(angle) for angle in angles] * 2, abs=1e-7)


def test_bfloat16_is_rounded_once() -> None:
    turn = rotary()
    x = torch.randn(2, 3, 24, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, _ = turn(x.double(), x.double())
    turned, _ = turn(x, x)
    assert turned.dtype == torch.bfloat16
    assert ((turned.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_is_in_no_state_dict() -> None:
    assert not rotary().state_dict()
