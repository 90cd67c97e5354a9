"""Token embedding, the first layer. Knows nothing of the blocks behind it."""

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.parameter import Normal
from scaling_slurm.core.tensor_parallel.embedding import VocabParallelEmbedding
from scaling_slurm.transformer.batch import Activation, Inputs
from scaling_slurm.transformer.config import ModelConfig


class Embedding(VocabParallelEmbedding):
    """Inputs -> Activation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, init=Normal(config.init_std))
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, inputs: Inputs) -> Activation:  # type: ignore[override]  # a layer, not a part of one
        hidden = self.dropout(super().forward(inputs.tokens), inputs.positions)  # [batch, seq, hidden]
        return Activation(hidden, inputs.positions, inputs.cache)
