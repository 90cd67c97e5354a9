"""The arithmetic of a model against published numbers, hand counts and torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling_slurm.core.topology.layout import Layout
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.flops import (
    checkpoint_bytes,
    count_parameters,
    estimate_memory,
    peak_flops,
    training_flops_per_token,
)


def model(**changes: int) -> ModelConfig:
    settings = {
        "vocab_size": 10,
        "hidden_size": 8,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "sequence_length": 16,
    }
    return ModelConfig.model_validate(settings | changes)


@pytest.mark.parametrize(
    ("published", "vocab_size", "hidden_size", "num_layers", "heads", "key_value_heads", "intermediate_size"),
    [
        (6_738_415_616, 32000, 4096, 32, 32, 32, 11008),  # Llama-2-7B
        (8_030_261_248, 128256, 4096, 32, 32, 8, 14336),  # Llama-3-8B
        (1_100_048_384, 32000, 2048, 22, 32, 4, 5632),  # TinyLlama-1.1B
    ],
)
def test_the_number_of_parameters_is_the_published_one(
    published: int,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    heads: int,
    key_value_heads: int,
    intermediate_size: int,
) -> None:
    shape = model(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=intermediate_size,
    )
    count = count_parameters(shape)
    assert count.total == published
    assert count.total - count.matmul == vocab_size * hidden_size + (2 * num_layers + 1) * hidden_size


def test_flops_per_token_by_hand() -> None:
    # A layer: query and output 64 each, key and value 32 each, MLP 3 x 96; the head 80.
    matmul = 2 * (64 + 64 + 32 + 32 + 288) + 80
    # Attention of one token, causal: on average 8 of 16 keys, 2 products of 2 x 8 FLOPs, and twice that backwards.
    attention = 2 * (8 * 2 * (2 * 8) * 3)
    assert training_flops_per_token(model()) == 6 * matmul + attention


def test_flops_of_the_matrices_agree_with_torchs_counter() -> None:
    shape = model()
    tokens = 5
    inputs = torch.zeros(tokens, 8, requires_grad=True)
    widths = [(8, 8), (8, 8), (8, 4), (8, 4), (8, 12), (8, 12), (12, 8)] * 2 + [(8, 10)]
    with FlopCounterMode(display=False) as counter:
        for width_in, width_out in widths:
            start = inputs if width_in == 8 else torch.zeros(tokens, width_in, requires_grad=True)
            torch.nn.functional.linear(start, torch.zeros(width_out, width_in, requires_grad=True)).sum().backward()
    attention = training_flops_per_token(shape) - 6 * count_parameters(shape).matmul
    assert counter.get_total_flops() == tokens * (training_flops_per_token(shape) - attention)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 120GB", 989.4e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("NVIDIA A10", None),
        ("NVIDIA H20", 148e12),
        ("", None),
        ("cpu", None),
    ],
)
def test_peak_by_the_name_that_the_driver_gives(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_memory_by_hand() -> None:
    layer = 64 + 64 + 32 + 32 + 288
    parameters = 2 * layer + 2 * 80 + 5 * 8
    estimate = estimate_memory(model(), Layout(), precision="bfloat16", micro_batch_size=3, accumulation=4)
    assert estimate.weights == 2 * parameters
    assert estimate.gradients == 4 * parameters
    assert estimate.optimizer == 12 * parameters
    kept = 4 * 8 + (8 + 8 + 4 + 4) + 4 * 12
    assert estimate.activations == 2 * kept * (3 * 16) * 2
    assert estimate.loss == 2 * (3 * 16 * 10 * 4) + 10 * 8 * (4 + 2)
    assert estimate.total == 18 * parameters + estimate.activations + estimate.loss


def test_the_loss_holds_a_chunk_of_the_logits_only() -> None:
    shape = model(vocab_size=128_000, sequence_length=8192)
    estimate = estimate_memory(shape, Layout(), precision="bfloat16", micro_batch_size=1, accumulation=1)
    assert estimate.loss == 2 * 256 * 2**20 + 128_000 * 8 * 6


def test_dropped_probabilities_are_kept() -> None:
    plain, dropped = (
        estimate_memory(shape, Layout(), precision="float32", micro_batch_size=1, accumulation=1).activations
        for shape in (model(), model().model_copy(update={"attention_dropout": 0.1}))
    )
    assert dropped - plain == 2 * (2 * 4 * 16) * 16 * 4


def test_float32_has_no_second_copy_of_the_weights() -> None:
    single = estimate_memory(model(), Layout(), precision="float32", micro_batch_size=1, accumulation=1)
    double = estimate_memory(model(), Layout(), precision="float64", micro_batch_size=1, accumulation=1)
    parameters = count_parameters(model()).total
    assert single.weights + single.gradients + single.optimizer == 16 * parameters
    assert double.weights + double.gradients + double.optimizer == 32 * parameters


def test_tensor_and_pipeline_split_the_matrices_but_not_the_norms() -> None:
    estimate = estimate_memory(
        model(), Layout(tensor=2, pipeline=2), precision="float32", micro_batch_size=1, accumulation=8
    )
    assert estimate.weights == 4 * ((480 + 80) // 2 + 3 * 8)
    # Two micro-batches wait on the first stage; what is as wide as the norms is on each tensor rank in full.
    assert estimate.activations == 2 * (32 + (24 + 48) // 2) * 16 * 4


def test_a_checkpoint_holds_master_weights_and_both_moments() -> None:
    total = count_parameters(model()).total
    assert checkpoint_bytes(model(), "bfloat16") == 12 * total
    assert checkpoint_bytes(model(), "float64") == 24 * total
