"""Every setting of the engine and its default, on one page. Knows no torch, no scheduler and no language model."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from scaling_slurm.settings import Duration, Settings

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class AllocationConfig(Settings):
    """What the run asks of a scheduler. Everything that a site decides stands in its cluster profile."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    tasks_per_node: PositiveInt | None = None
    """Ranks on each node; by default one for each GPU of the cluster's nodes (one for each node without GPUs)."""
    time: Duration | None = None
    """Time limit of one job, in any of Slurm's forms; by default the partition's. Quote it: "24:00:00"."""


class TopologyConfig(Settings):
    """How the ranks are arranged: world size = tensor x pipeline x data."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that the layers are cut into."""
    data_parallel_size: PositiveInt | None = None
    """Copies of the model that share the batch; by default whatever the world size leaves."""


class OptimizerConfig(Settings):
    """AdamW (https://arxiv.org/abs/1711.05101) with linear warm-up and cosine decay."""

    learning_rate: PositiveFloat = 3e-4
    """Peak, reached at the end of the warm-up."""
    minimum_learning_rate: NonNegativeFloat = 3e-5
    """Reached exactly at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up; step 1 uses learning_rate / warmup_steps."""
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """Multiplied by the learning rate; applied to matrices, not to biases and norms."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""

    @model_validator(mode="after")
    def _ordered(self) -> "OptimizerConfig":
        if self.minimum_learning_rate > self.learning_rate:
            raise ValueError(
                f"minimum_learning_rate {self.minimum_learning_rate} is above learning_rate {self.learning_rate}"
            )
        return self


class RequeueConfig(Settings):
    """What happens after a signal stopped the run: by default the job is requeued and continues."""

    enabled: bool = True
    """Requeue after preemption, at the time limit and after a lost node."""
    max_preemptions: NonNegativeInt = 100
    max_timeouts: NonNegativeInt = 100
    max_node_failures: NonNegativeInt = 10
    max_without_progress: PositiveInt = 2
    """Attempts in a row that may end without a single new step in a checkpoint; then the run stops."""


class TrainerConfig(Settings):
    """The training loop."""

    num_steps: PositiveInt
    """Optimizer steps of the whole run."""
    global_batch_size: PositiveInt
    """Sequences of one optimizer step over all ranks; accumulation is derived from it."""
    micro_batch_size: PositiveInt = 1
    """Sequences of one forward pass on one rank."""
    seed: NonNegativeInt = 0
    """Keys the initial weights, the order of the samples and dropout."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of weights and activations; master weights, sums of gradients and optimizer state are at least float32."""
    save_interval: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    evaluation_interval: PositiveInt | None = None
    """Steps between passes over the validation set; None: never."""
    evaluation_samples: PositiveInt | None = None
    """Sequences of one evaluation, the same ones whatever the batch size; by default the whole validation set."""
    log_interval: PositiveInt = 1
    """Steps between lines on the console; metrics.jsonl has every step."""
    max_skipped_steps: PositiveInt = 20
    """Steps in a row with a non-finite loss or gradient, each skipped on all ranks, after which the run fails."""
    record_samples: bool = False
    """Write the sample ids that each step consumed, a file a rank and attempt."""
    tensorboard: bool = False
    """Write TensorBoard files too."""
    deterministic: bool = False
    """Pin algorithms so that a GPU run repeats to the last bit; CPU runs always do."""
    timeout_minutes: PositiveFloat = 20.0
    """A collective that waits longer fails the run."""
    requeue: RequeueConfig = RequeueConfig()
