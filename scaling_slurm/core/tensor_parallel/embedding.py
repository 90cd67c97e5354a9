"""An embedding whose rows tensor parallel ranks share. Used alone it is nn.Embedding."""

from torch import nn

from scaling_slurm.core.parameter import Init, Normal, ParameterSpec, declare


class VocabParallelEmbedding(nn.Embedding):
    """Splits its rows over tensor parallel ranks. `init` is what ParallelModule.bind gives it, by default Normal(1)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init: Init | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim)
        declare(self, "weight", ParameterSpec(sharded_dim=0, init=init or Normal(1.0)))

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # for which torch would load its compiler, a second of each rank's start
            super().reset_parameters()
