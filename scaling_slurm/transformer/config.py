"""The run file: what a researcher writes in YAML. Knows no torch and no site."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from scaling_slurm.core.config import AllocationConfig, OptimizerConfig, Probability, TopologyConfig, TrainerConfig
from scaling_slurm.errors import RefusedError
from scaling_slurm.resources import find, shipped_folder
from scaling_slurm.settings import Loaded, Settings, load_settings


class ModelConfig(Settings):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of ids."""
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    """Query heads share key-value heads in equal groups (https://arxiv.org/abs/2305.13245); by default none share."""
    intermediate_size: PositiveInt
    """Width of the SwiGLU (https://arxiv.org/abs/2002.05202)."""
    sequence_length: PositiveInt
    """Tokens of a training sample, and the longest context."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies (https://arxiv.org/abs/2104.09864)."""
    norm_epsilon: PositiveFloat = 1e-5
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial matrices; of those that write into the residual / sqrt(2 num_layers) of it."""
    embedding_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    """Of the attention probabilities; takes the unfused path."""
    residual_dropout: Probability = 0.0
    """After attention and after the MLP."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @model_validator(mode="after")
    def _divisible(self) -> "ModelConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.head_size % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads = {self.head_size} is odd: rotary positions need an even head size"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_key_value_heads {self.key_value_heads}"
            )
        return self


class DataConfig(Settings):
    """Token files as `scaling prepare` writes them. Relative paths start at the working directory."""

    train: Path
    """Prefix of a .bin/.idx pair."""
    validation: Path | None = None
    """Prefix of a .bin/.idx pair; needed when trainer.evaluation_interval is set."""
    tokenizer: Path | None = None
    """tokenizer.json; by default the one beside the token files."""


class RunConfig(Settings):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Starts the run's id: letters, digits, '.', '_' and '-'."""
    allocation: AllocationConfig = AllocationConfig()
    topology: TopologyConfig = TopologyConfig()
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.trainer.evaluation_interval and self.data.validation is None:
            raise ValueError("trainer.evaluation_interval is set, but data.validation is not")
        return self

    def with_absolute_paths(self) -> "RunConfig":
        """The same run, not depending on the directory that its job starts in."""
        data = self.data
        paths = {
            name: path.expanduser().absolute() for name in type(data).model_fields if (path := getattr(data, name))
        }
        return self.model_copy(update={"data": data.model_copy(update=paths)})


def refuse_another_model(before: RunConfig, after: RunConfig, run_id: str) -> None:
    """Raises RefusedError for settings that the checkpoints of a run cannot follow."""
    changed = [section for section in ("name", "model") if getattr(before, section) != getattr(after, section)]
    if (before.trainer.precision == "float64") != (after.trainer.precision == "float64"):
        changed.append("trainer.precision")  # its master weights and optimizer state are kept in float64 too
    if changed:
        raise RefusedError(
            f"{' and '.join(changed)} of {run_id} cannot change: its checkpoints hold the old one",
            "`scaling submit` starts a new run",
            "the command line",
        )


def load_run(name_or_path: str, overrides: Sequence[str] = ()) -> Loaded[RunConfig]:
    """Find a run file by its name or path and read it, with dotted overrides on top. Raises ConfigError."""
    return load_settings(
        RunConfig, find("configs", name_or_path), overrides=overrides, shipped=shipped_folder("configs")
    )
