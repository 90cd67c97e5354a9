"""The engine's settings: which values there are, and that none is left without an explanation."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from scaling_slurm.core.config import AllocationConfig, OptimizerConfig, RequeueConfig, TopologyConfig, TrainerConfig

SECTIONS = [AllocationConfig, TopologyConfig, OptimizerConfig, RequeueConfig]
STEPS = {"num_steps": 10, "global_batch_size": 4}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_may_be_left_out(section: type[BaseModel]):
    section()


def test_a_training_loop_needs_its_length_and_its_batch():
    with pytest.raises(ValidationError) as missing:
        TrainerConfig()  # type: ignore[call-arg]
    assert {error["loc"] for error in missing.value.errors()} == {("num_steps",), ("global_batch_size",)}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (OptimizerConfig, {"learning_rate": 1e-3, "minimum_learning_rate": 2e-3}),
        (OptimizerConfig, {"learning_rate": 0.0}),
        (OptimizerConfig, {"learning_rate": float("inf")}),
        (OptimizerConfig, {"beta2": 1.0}),
        (OptimizerConfig, {"gradient_clipping": -1.0}),
        (OptimizerConfig, {"warmup_steps": -1}),
        (AllocationConfig, {"nodes": 0}),
        (AllocationConfig, {"time": 90}),
        (TopologyConfig, {"data_parallel_size": 0}),
        (RequeueConfig, {"max_without_progress": 0}),
        (TrainerConfig, STEPS | {"precision": "float16"}),
        (TrainerConfig, STEPS | {"evaluation_interval": 0}),
        (TrainerConfig, STEPS | {"unknown": 1}),
    ],
)
def test_values_that_would_not_train_are_refused(section: type[BaseModel], values: dict[str, Any]):
    with pytest.raises(ValidationError):
        section(**values)


def test_the_edges_that_are_allowed():
    OptimizerConfig(learning_rate=1e-3, minimum_learning_rate=1e-3, beta1=0.0, gradient_clipping=0.0)
    RequeueConfig(max_preemptions=0, max_timeouts=0, max_node_failures=0)


def test_settings_cannot_change():
    with pytest.raises(ValidationError, match="frozen"):
        TrainerConfig(**STEPS).seed = 3  # type: ignore[misc]
