"""The language model as a list of layers, top to bottom. Knows neither how they are run nor on how many devices."""

import logging
from functools import partial

from torch import Tensor

from scaling_slurm.core.data.loader import MicroBatch
from scaling_slurm.core.pipeline.parallel_module import LayerSpec, ParallelModule
from scaling_slurm.core.tensor_parallel.cross_entropy import IGNORED
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.model.block import Block
from scaling_slurm.transformer.model.embedding import Embedding
from scaling_slurm.transformer.model.head import Head
from scaling_slurm.transformer.model.loss import loss
from scaling_slurm.transformer.model.norm import FinalNorm

logger = logging.getLogger(__name__)


def build_layers(config: ModelConfig) -> list[LayerSpec]:
    """A Llama-style decoder (https://arxiv.org/abs/2302.13971): takes Inputs, gives a Prediction."""
    if config.attention_dropout:
        logger.warning(
            "model.attention_dropout %g: attention takes the unfused path, which is slower and holds "
            "[batch, heads, seq, seq] probabilities; 0 uses the fused kernel",
            config.attention_dropout,
        )
    return [
        LayerSpec("embedding", partial(Embedding, config)),
        *(LayerSpec(f"layers.{index}", partial(Block, config, index)) for index in range(config.num_layers)),
        LayerSpec("norm", partial(FinalNorm, config)),
        LayerSpec("head", partial(Head, config)),
    ]


def compute_loss(model: ParallelModule, batch: MicroBatch) -> tuple[Tensor, int]:
    """The loss summed over a micro-batch, and the number of its tokens. Give it the batch where it was read: it counts
    on the host, so that a device is not waited for, and then moves the batch to the model's device.
    """
    count = int((batch.targets != IGNORED).sum())
    batch = batch.to(next(model.parameters()).device)
    return loss(model(Inputs(batch.inputs, batch.positions)), batch.targets), count
