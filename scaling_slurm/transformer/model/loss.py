"""The training loss: cross entropy summed over tokens, and how many these are. Knows no batch of the data loader."""

from torch import Tensor

from scaling_slurm.core.tensor_parallel.cross_entropy import linear_cross_entropy
from scaling_slurm.transformer.model.head import Prediction


def loss(prediction: Prediction, targets: Tensor) -> Tensor:
    """Sum over all tokens of -log p(target), in nats.

    Args:
        targets: [batch, seq] int64 ids; those that are IGNORED add nothing.
    """
    return linear_cross_entropy(prediction.hidden.flatten(0, 1), prediction.head.weight, targets.flatten())
