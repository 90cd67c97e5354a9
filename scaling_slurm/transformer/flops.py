"""Arithmetic of a model: parameters, floating-point operations, peak speed of GPUs, memory of a rank.

Pure functions of the settings, without torch: the login node plans with them and the trainer reports with them.
"""

import re
from dataclasses import dataclass

from scaling_slurm.core.topology.layout import Layout
from scaling_slurm.transformer.config import ModelConfig

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
LOGITS_BYTES = 256 * 2**20
"""Of one chunk of logits at most; the loss holds two copies."""

# Dense bfloat16 peaks in FLOP/s, from the vendors' data sheets. The first entry whose words are all in the name counts.
PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        ("V100", 125e12),
        ("A30", 165e12),
        ("A40", 149.7e12),
        ("A100", 312e12),
        ("L40S", 362e12),
        ("H20", 148e12),
        ("H100 PCIE", 756e12),
        ("H100 NVL", 835.5e12),
        ("H100", 989.4e12),
        ("H200 NVL", 835.5e12),
        ("H200", 989.4e12),
        ("GH200", 989.4e12),
        ("B200", 2250e12),
        ("GB200", 2500e12),
        ("MI250X", 191.5e12),  # what the scheduler counts as a GPU is one of the card's two dies
        ("MI300A", 980.6e12),
        ("MI300X", 1307.4e12),
    )
)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model."""

    total: int
    matmul: int
    """Those that every token is multiplied with: all matrices but the input embedding, with the output head."""


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Parameters of the decoder with an untied head and without biases."""
    head = model.vocab_size * model.hidden_size
    norms = (2 * model.num_layers + 1) * model.hidden_size
    matmul = model.num_layers * _layer_matrices(model) + head
    return ParameterCount(total=matmul + head + norms, matmul=matmul)


def _layer_matrices(model: ModelConfig) -> int:
    key_value_size = model.key_value_heads * model.head_size
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size * key_value_size
    return attention + 3 * model.hidden_size * model.intermediate_size


def training_flops_per_token(model: ModelConfig) -> int:
    """Forward and backward, averaged over a full sequence; recomputation is not counted.

    6 for each matrix parameter, and 6 x layers x hidden x sequence for attention, of which a causal mask needs only
    half of the 12 of PaLM's formula (https://arxiv.org/abs/2204.02311, appendix B).
    """
    attention = 6 * model.num_layers * model.num_attention_heads * model.head_size * model.sequence_length
    return 6 * count_parameters(model).matmul + attention


def peak_flops(gpu_name: str) -> float | None:
    """Dense bfloat16 peak of one GPU, in FLOP/s, by the name that its driver gives; None for an unknown GPU."""
    words = set(re.split(r"[^A-Z0-9]+", gpu_name.upper()))
    return next((peak for needed, peak in PEAKS if needed <= words), None)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank; allocator, kernels' work space and communication buffers come on top."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss


def estimate_memory(
    model: ModelConfig, layout: Layout, *, precision: str, micro_batch_size: int, accumulation: int
) -> MemoryEstimate:
    """Memory of the fullest rank without recomputation.

    Attention is fused and keeps no probabilities, unless they are dropped out. The loss works on chunks of logits.
    Sums and moments are float32, or float64 for float64; bfloat16 weights have a float32 master copy beside them.
    """
    compute = BYTES[precision]
    master = max(compute, 4)
    parameters = _parameters_of_fullest_rank(model, layout)
    tokens = micro_batch_size * model.sequence_length
    in_flight = min(accumulation, layout.pipeline)  # micro-batches that wait for their backward pass on the first stage
    return MemoryEstimate(
        weights=parameters * compute,
        gradients=parameters * master,
        optimizer=parameters * (2 * master + (master if compute < master else 0)),
        activations=_layers_of_a_stage(model, layout)
        * _layer_activations(model, layout)
        * tokens
        * compute
        * in_flight,
        loss=_loss_bytes(model, layout, tokens, compute, master),
    )


def checkpoint_bytes(model: ModelConfig, precision: str) -> int:
    """Size of one checkpoint: master weights and two moments of each parameter."""
    return 3 * max(BYTES[precision], 4) * count_parameters(model).total


def _layers_of_a_stage(model: ModelConfig, layout: Layout) -> int:
    return -(-model.num_layers // layout.pipeline)


def _parameters_of_fullest_rank(model: ModelConfig, layout: Layout) -> int:
    table = model.vocab_size * model.hidden_size // layout.tensor
    tables = 2 * table if layout.pipeline == 1 else table
    layers = _layers_of_a_stage(model, layout)
    return layers * _layer_matrices(model) // layout.tensor + tables + (2 * layers + 1) * model.hidden_size


def _layer_activations(model: ModelConfig, layout: Layout) -> int:
    """Elements for each token that one layer keeps for its backward pass on one rank."""
    whole = 4 * model.hidden_size  # input and output of both norms
    attention = 2 * model.hidden_size + 2 * model.key_value_heads * model.head_size  # query, output, key, value
    if model.attention_dropout:
        attention += 2 * model.num_attention_heads * model.sequence_length  # probabilities, before and after
    mlp = 4 * model.intermediate_size  # gate, its activation, up, their product
    return whole + (attention + mlp) // layout.tensor


def _loss_bytes(model: ModelConfig, layout: Layout, tokens: int, compute: int, master: int) -> int:
    """Two copies of a chunk of logits, and the head's gradient, which is summed up before the backward pass."""
    vocabulary = model.vocab_size // layout.tensor
    return 2 * min(LOGITS_BYTES, tokens * vocabulary * master) + vocabulary * model.hidden_size * (master + compute)
