from itertools import islice

import pytest
import torch
from torch import Tensor

from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.inference.engine import Engine, FinishReason
from scaling_slurm.transformer.inference.kv_cache import KVCache
from scaling_slurm.transformer.inference.sampling import SamplingConfig
from tests.support.language_model import bound_model, random_tokens, small_config

CPU = torch.device("cpu")


def uncached_logits(model: ParallelModule, tokens: Tensor) -> Tensor:
    """[batch, seq, vocab], of the same forward pass that training uses."""
    with torch.no_grad():
        result: Tensor = model(Inputs(tokens, torch.zeros(len(tokens), dtype=torch.int64))).logits()
    return result


def uncached_greedy(model: ParallelModule, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(uncached_logits(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def new_cache(config: ModelConfig, batch: int = 1) -> KVCache:
    return KVCache(config, batch=batch, max_length=config.sequence_length, device=CPU, dtype=torch.float64)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (7, 1, 1, 5, 1, 9)], ids=["prefill", "decode", "mixed"])
def test_cached_logits_equal_the_training_forward(key_value_heads: int, pieces: tuple[int, ...]) -> None:
    config = small_config(num_key_value_heads=key_value_heads)
    model = bound_model(config).eval()
    tokens = random_tokens(2, 24, config=config)
    cache = new_cache(config, batch=2)
    with torch.inference_mode():
        parts = [model(Inputs(part, torch.arange(2), cache)).logits() for part in tokens.split(pieces, dim=1)]
    logits, expected = torch.cat(parts, dim=1), uncached_logits(model, tokens)
    assert (logits - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("length", [1, 5, 23])
def test_greedy_equals_generation_without_a_cache(length: int) -> None:
    config = small_config(sequence_length=48)
    model = bound_model(config).eval()
    prompt = random_tokens(length, config=config).tolist()
    generated = list(Engine(model, config).generate(prompt, max_tokens=20))
    assert generated == uncached_greedy(model, prompt, 20)
    assert len(set(generated)) > 3, "a model that repeats itself would not show an error"


def test_requests_do_not_disturb_each_other() -> None:
    """One after the other, abandoned half-way, and two at once: each as if by a fresh engine."""
    config = small_config(sequence_length=48)
    model = bound_model(config)
    first, second = random_tokens(9, config=config).tolist(), random_tokens(4, config=config, seed=1).tolist()
    expected = {len(p): list(Engine(model, config).generate(p, max_tokens=12)) for p in (first, second)}
    engine = Engine(model, config)
    assert list(engine.generate(first, max_tokens=12)) == expected[9]
    assert list(islice(engine.generate(first, max_tokens=12), 5)) == expected[9][:5]
    assert list(engine.generate(second, max_tokens=12)) == expected[4]
    both = list(zip(engine.generate(first, max_tokens=12), engine.generate(second, max_tokens=12), strict=True))
    assert both == list(zip(expected[9], expected[4], strict=True))


def test_a_seed_decides_the_samples_whatever_torch_drew_before() -> None:
    config = small_config(sequence_length=48)
    engine = Engine(bound_model(config, torch.float32), config)

    def draw(seed: int) -> list[int]:
        torch.rand(3)
        return list(engine.generate([1, 2, 3], max_tokens=16, sampling=SamplingConfig(temperature=1.0, seed=seed)))

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_ends_at_max_tokens() -> None:
    config = small_config()
    generation = Engine(bound_model(config), config).generate([1, 2], max_tokens=3)
    assert generation.finish_reason is None
    assert len(list(generation)) == 3
    assert generation.finish_reason == FinishReason.MAX_TOKENS
    assert next(generation, None) is None


def test_ends_at_a_stop_token_which_is_left_out() -> None:
    config = small_config()
    model = bound_model(config)
    engine = Engine(model, config)
    tokens = list(engine.generate([1, 2], max_tokens=12))
    stop = tokens[5]
    generation = engine.generate([1, 2], max_tokens=12, stop_tokens=[stop, 60])
    assert list(generation) == tokens[: tokens.index(stop)]
    assert generation.finish_reason == FinishReason.STOP
    assert next(generation, None) is None


@pytest.mark.parametrize("length", [1, 20, 24])
def test_ends_when_the_context_is_full(length: int) -> None:
    """The model reads 24 tokens; what it says after the last one still counts."""
    config = small_config()
    model = bound_model(config)
    prompt = random_tokens(length, config=config).tolist()
    generation = Engine(model, config).generate(prompt, max_tokens=1000)
    tokens = list(generation)
    assert len(tokens) == 24 - length + 1
    assert generation.finish_reason == FinishReason.CONTEXT
    assert tokens == uncached_greedy(model, prompt, len(tokens))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "no tokens"), ([1] * 25, "25 tokens; the model reads at most 24"), ([3, 61], "token id 61"), ([-1], "id -1")],
)
def test_refuses_prompts_that_cannot_be_continued(prompt: list[int], words: str) -> None:
    config = small_config()
    with pytest.raises(ConfigError, match=words):
        Engine(bound_model(config), config).generate(prompt, max_tokens=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cache_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    config = small_config()
    engine = Engine(bound_model(config, dtype), config)
    generation = engine.generate([1, 2, 3], max_tokens=4)
    assert len(list(generation)) == 4
    assert {layer.keys.dtype for layer in generation._cache.layers} == {dtype}


def test_the_cache_is_never_moved() -> None:
    config = small_config()
    generation = Engine(bound_model(config), config).generate([1, 2, 3], max_tokens=10)
    before = [layer.keys.data_ptr() for layer in generation._cache.layers]
    list(generation)
    assert [layer.keys.data_ptr() for layer in generation._cache.layers] == before
    assert generation._cache.max_length == 13


def test_dropout_is_off_whatever_mode_the_model_was_in() -> None:
    config = small_config(residual_dropout=0.5, attention_dropout=0.5, embedding_dropout=0.5)
    model = bound_model(config).train()
    plain = bound_model(small_config())
    tokens = list(Engine(model, config).generate([1, 2, 3], max_tokens=10))
    assert tokens == list(Engine(plain, config).generate([1, 2, 3], max_tokens=10))
