import pytest
import torch

from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.inference.sampling import Sampler, SamplingConfig, candidates

CPU = torch.device("cpu")
PROBABILITIES = (0.08, 0.5, 0.02, 0.25, 0.15)
LOGITS = torch.tensor([PROBABILITIES]).log()


def distribution(logits: torch.Tensor, **settings: float) -> list[list[float]]:
    """The normalised probability of each token, by its id."""
    probabilities, tokens = candidates(logits, SamplingConfig(**{"temperature": 1.0, **settings}))  # type: ignore[arg-type]
    full = torch.zeros(logits.shape).scatter(-1, tokens, probabilities)
    return (full / full.sum(-1, keepdim=True)).tolist()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.49}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 0.74}, {1, 3}),
        ({"top_p": 0.76}, {1, 3, 4}),
        ({"top_p": 0.97}, {0, 1, 3, 4}),
        # top_p acts on what top_k left: 0.5 / 0.75 = 0.667
        ({"top_k": 2, "top_p": 0.66}, {1}),
        ({"top_k": 2, "top_p": 0.68}, {1, 3}),
    ],
)
def test_table(settings: dict[str, float], kept: set[int]) -> None:
    mass = sum(PROBABILITIES[token] for token in kept)
    expected = [value / mass if token in kept else 0.0 for token, value in enumerate(PROBABILITIES)]
    assert distribution(LOGITS, **settings)[0] == pytest.approx(expected, abs=1e-6)


def test_rows_of_a_batch_are_filtered_each_by_itself() -> None:
    flat = torch.zeros(1, 5)
    both = distribution(torch.cat((LOGITS, flat)), top_p=0.5)
    assert both[0] == pytest.approx([0, 1, 0, 0, 0])
    assert sorted(both[1]) == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_ties_do_not_widen_top_k() -> None:
    assert sum(value > 0 for value in distribution(torch.ones(1, 10), top_k=4)[0]) == 4


def test_temperature_flattens_and_sharpens() -> None:
    squared = [value**2 for value in PROBABILITIES]
    expected = [value / sum(squared) for value in squared]
    assert distribution(LOGITS, temperature=0.5)[0] == pytest.approx(expected, rel=1e-5)
    assert distribution(1000 * LOGITS, temperature=1e-36)[0] == [0, 1, 0, 0, 0]
    assert distribution(LOGITS, temperature=1e30)[0] == pytest.approx([0.2] * 5)


def test_temperature_zero_is_greedy() -> None:
    sampler = Sampler(SamplingConfig(temperature=0.0, top_k=3, top_p=0.5), CPU)
    assert sampler(torch.cat((LOGITS, LOGITS.flip(-1)))).tolist() == [1, 3]


def test_frequencies_are_the_probabilities() -> None:
    sampler = Sampler(SamplingConfig(temperature=1.0, top_k=4, seed=3), CPU)
    drawn = sampler(LOGITS.expand(20000, -1)).bincount(minlength=5) / 20000
    expected = torch.tensor(PROBABILITIES) / 0.98
    expected[2] = 0.0
    assert (drawn - expected).abs().max() < 5 * (0.25 / 20000) ** 0.5
    assert drawn[2] == 0


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    """In bfloat16 the sum of 4096 probabilities, and with it top_p, would be far off."""
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    kept = sum(value > 0 for value in distribution(logits, top_p=0.5)[0])
    assert kept == pytest.approx(2048, abs=2)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_refuses_settings_without_meaning(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="; "):
        SamplingConfig(**settings)  # type: ignore[arg-type]
