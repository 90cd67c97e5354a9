"""The learning rate as a pure function of the step, so that there is no schedule to save. Knows no optimizer."""

import math

from scaling_slurm.core.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """Of the optimizer step `step`, counted from 1 to `num_steps`.

    It rises linearly over the warm-up, step 1 having peak / warmup_steps and step warmup_steps the peak, then falls
    on a half cosine (https://arxiv.org/abs/1608.03983), to the minimum exactly at num_steps and beyond. A warm-up of
    all num_steps ends at the peak.
    """
    assert step >= 1, step
    peak, minimum, warmup = config.learning_rate, config.minimum_learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if step >= num_steps:
        return minimum
    progress = (step - warmup) / (num_steps - warmup)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
