import math

import pytest

from scaling_slurm.core.config import OptimizerConfig
from scaling_slurm.core.optimizer.learning_rate import learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, minimum_learning_rate=0.1, warmup_steps=4)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 1.0),
        (5, 0.1 + 0.45 * (1 + math.cos(math.pi / 8))),
        (6, 0.1 + 0.45 * (1 + math.sqrt(0.5))),
        (8, 0.55),
        (10, 0.1 + 0.45 * (1 - math.sqrt(0.5))),
    ],
)
def test_hand_values(step: int, expected: float) -> None:
    assert learning_rate(step, CONFIG, 12) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("num_steps", [5, 7, 12, 1000, 99_991])
def test_the_last_step_has_the_minimum_exactly(num_steps: int) -> None:
    config = OptimizerConfig(learning_rate=3e-4, minimum_learning_rate=3.3e-5, warmup_steps=4)
    rates = [learning_rate(step, config, num_steps) for step in range(1, num_steps + 1)]
    assert rates[-1] == 3.3e-5
    assert rates[3] == max(rates) == 3e-4
    assert rates[0] == 3e-4 / 4
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert learning_rate(num_steps + 5, config, num_steps) == 3.3e-5


def test_without_warm_up_and_with_nothing_else() -> None:
    config = OptimizerConfig(learning_rate=1.0, minimum_learning_rate=0.0)
    assert [learning_rate(step, config, 2) for step in (1, 2)] == pytest.approx([0.5, 0.0])
    assert learning_rate(1, config, 1) == 0.0
    assert learning_rate(4, CONFIG, 4) == 1.0
