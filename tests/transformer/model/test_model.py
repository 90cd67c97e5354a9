"""The whole model against Hugging Face's Llama with the same weights."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from scaling_slurm.core.data.loader import MicroBatch
from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.model.model import build_layers, compute_loss
from tests.support.language_model import bound_model, random_tokens, small_config

NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def oracle_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{NAMES[stem]}.weight"
    _, index, rest = stem.split(".", 2)
    return f"model.layers.{index}.{NAMES[rest]}.weight"


class ExactNorm(torch.nn.RMSNorm):
    """Theirs goes through float32 even in a float64 model."""


class ExactRotary(torch.nn.Module):
    """Theirs computes angles in float32. Written as complex powers, unlike ours; the tables are float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(self.config.head_size // 2).double() / (self.config.head_size // 2)
        turns = torch.polar(torch.tensor(1.0).double(), self.config.rotary_base**-steps)
        phases = torch.stack([turns ** int(position) for position in position_ids[0]]).repeat(1, 2)[None]
        return phases.real.float().to(x.dtype), phases.imag.float().to(x.dtype)


def oracle_of(model: ParallelModule, config: ModelConfig, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face's Llama")
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.key_value_heads,
        max_position_embeddings=config.sequence_length,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    oracle = transformers.LlamaForCausalLM(settings).to(dtype)
    if dtype == torch.float64:
        for module in list(oracle.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(module, name, ExactNorm(config.hidden_size, config.norm_epsilon, dtype=dtype))
        oracle.model.rotary_emb = ExactRotary(config)
    oracle.load_state_dict({oracle_name(info.name): info.parameter.detach() for info in model.parameter_infos()})
    return oracle.train()


@pytest.mark.parametrize("key_value_heads", [4, 2, 1], ids=["multi_head", "grouped", "multi_query"])
@pytest.mark.parametrize("sequence", [24, 17], ids=["full", "shorter"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equals_huggingface_llama(key_value_heads: int, sequence: int, dtype: torch.dtype, tolerance: float) -> None:
    config = small_config(num_key_value_heads=key_value_heads, rotary_base=500.0, norm_epsilon=1e-3)
    model = bound_model(config, dtype)
    with torch.no_grad():
        for info in model.parameter_infos():
            if "norm" in info.name:  # ones would not show a norm in the wrong place
                info.parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(info.name)))
    oracle = oracle_of(model, config, dtype)
    tokens = random_tokens(3, sequence + 1, config=config)

    logits = model(Inputs(tokens[:, :-1], torch.arange(3))).logits()
    theirs = oracle(tokens[:, :-1]).logits
    assert_close(logits, theirs, tolerance)

    total, count = compute_loss(model, MicroBatch(tokens, torch.arange(3), torch.arange(3)))
    assert count == 3 * sequence
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert_close(total, expected, tolerance)
    if dtype == torch.float32:  # their own loss, which shifts the labels itself, is in float32 always
        assert_close(total / count, oracle(tokens, labels=tokens).loss, tolerance)

    total.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    infos = model.parameter_infos()
    assert {oracle_name(info.name) for info in infos} == set(gradients)
    for info in infos:
        assert info.parameter.grad is not None, info.name
        assert_close(info.parameter.grad, gradients[oracle_name(info.name)], 10 * tolerance)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype
    error = (ours - theirs).norm() / theirs.norm()
    assert error < tolerance, f"relative error {error:.1e}"


def test_names_and_shapes() -> None:
    config = small_config(num_layers=1)
    shapes = {info.name: tuple(info.shape) for info in bound_model(config).parameter_infos()}
    assert shapes == {
        "embedding.weight": (61, 32),
        "layers.0.attention_norm.weight": (32,),
        "layers.0.attention.query.weight": (32, 32),
        "layers.0.attention.key.weight": (16, 32),
        "layers.0.attention.value.weight": (16, 32),
        "layers.0.attention.output.weight": (32, 32),
        "layers.0.mlp_norm.weight": (32,),
        "layers.0.mlp.gate.weight": (40, 32),
        "layers.0.mlp.up.weight": (40, 32),
        "layers.0.mlp.down.weight": (32, 40),
        "norm.weight": (32,),
        "head.weight": (61, 32),
    }


def test_initial_values() -> None:
    config = small_config(hidden_size=256, intermediate_size=512, vocab_size=500, num_layers=8, init_std=0.02)
    for info in bound_model(config, torch.float32).parameter_infos():
        if "norm" in info.name:
            assert (info.parameter == 1).all()
            continue
        writes_residual = info.name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = 0.02 / 4 if writes_residual else 0.02  # sqrt(2 * 8) = 4
        count = info.parameter.numel()
        assert info.parameter.std().item() == pytest.approx(expected, rel=5 / (2 * count) ** 0.5), info.name
        assert abs(info.parameter.mean().item()) < 5 * expected / count**0.5, info.name


def test_future_tokens_change_nothing() -> None:
    config = small_config()
    model = bound_model(config)
    tokens = random_tokens(1, 24, config=config)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % config.vocab_size
    before, after = (model(Inputs(one, torch.zeros(1, dtype=torch.int64))).logits() for one in (tokens, changed))
    difference = (before - after).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 1e-3


def test_bfloat16_is_close_to_float32() -> None:
    config = small_config(init_std=0.1)
    exact, rounded = bound_model(config, torch.float32), bound_model(config, torch.bfloat16)
    for ours, theirs in zip(rounded.parameters(), exact.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    inputs = Inputs(random_tokens(2, 24, config=config), torch.arange(2))
    logits, expected = rounded(inputs).logits(), exact(inputs).logits()
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("field", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_dropout_acts_in_training_only(field: str) -> None:
    config, plain = small_config(**{field: 0.5}), small_config()
    model, reference = bound_model(config), bound_model(plain)
    inputs = Inputs(random_tokens(2, 24, config=config), torch.tensor([5, 6]))
    expected = reference(inputs).logits()
    training = model(inputs).logits()
    assert (training - expected).norm() / expected.norm() > 0.05
    assert torch.equal(training, model(inputs).logits()), "the mask follows from the positions"
    elsewhere = model(Inputs(inputs.tokens, torch.tensor([5, 7]))).logits()
    assert torch.equal(training[0], elsewhere[0])
    assert not torch.equal(training[1], elsewhere[1])
    assert torch.equal(model.eval()(inputs).logits(), expected)


@pytest.mark.parametrize(
    "site",
    ["embedding.dropout", "layers.1.attention.dropout", "layers.1.attention_dropout", "layers.1.mlp_dropout"],
)
def test_each_dropout_acts(site: str) -> None:
    config = small_config()
    model = bound_model(config)
    inputs = Inputs(random_tokens(2, 24, config=config), torch.arange(2))
    expected = model(inputs).logits()
    sites = {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert len(sites) == 1 + 2 * 3
    sites[site].probability = 0.5
    assert (model(inputs).logits() - expected).norm() / expected.norm() > 0.05


def test_attention_dropout_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bound_model(small_config())
        assert not caplog.messages
        bound_model(small_config(attention_dropout=0.1, num_layers=3))
    assert len(caplog.messages) == 1
    assert "unfused" in caplog.messages[0]


def test_ignored_targets_do_not_count() -> None:
    config = small_config()
    model = bound_model(config)
    tokens = random_tokens(3, 25, config=config)
    positions = torch.arange(3)
    alone, count = compute_loss(model, MicroBatch(tokens[:2], positions[:2], positions[:2]))
    padded, padded_count = compute_loss(model, MicroBatch(tokens, positions, torch.tensor([0, 1, -1])))
    assert count == padded_count == 48
    assert padded.item() == pytest.approx(alone.item(), rel=1e-12)


def test_layers_are_built_in_reading_order() -> None:
    assert [spec.name for spec in build_layers(small_config(num_layers=3))] == [
        "embedding", "layers.0", "layers.1", "layers.2", "norm", "head",
    ]  # fmt: skip
