"""What the loop carries from step to step: the ranks' agreement, the run's progress, how it ended. Decides nothing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scaling_slurm.core.trainer.preemption import StopCause


@dataclass(frozen=True)
class Agreement:
    """The sum over all ranks of what each knows about a step."""

    loss_sum: float
    """Of the loss over all tokens of the global batch."""
    tokens: float
    squared_norm: float
    """Of the gradient of `loss_sum`."""
    void: float
    """Ranks that joined without data, because a stop was requested while they waited; nothing of such a step counts."""
    deadline: float
    """Ranks whose job is about to reach its time limit."""
    signal: float
    """Ranks that received a signal."""
    stop_file: float
    """Ranks that saw the STOP file."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.squared_norm)

    @property
    def stop(self) -> StopCause:
        causes = (
            (StopCause.STOP_FILE, self.stop_file),
            (StopCause.SIGNAL, self.signal),
            (StopCause.DEADLINE, self.deadline),
        )
        return next((cause for cause, ranks in causes if ranks), StopCause.NONE)


@dataclass
class Progress:
    """What a checkpoint remembers of the loop itself; all of it follows from the steps that were done."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    evaluation_due: bool = False
    """The step is done, but not yet its evaluation."""


@dataclass(frozen=True)
class Outcome:
    """How `Trainer.fit` ended."""

    attempt: int
    first_step: int
    """Steps that were already done when it began."""
    step: int
    """Steps that are in the newest checkpoint."""
    stopped_by: StopCause
    """NONE when the last step is done."""


class AgreementInFlight:
    """An agreed vector on its way to the host; on a GPU, reading it waits for its own step and for no later one."""

    def __init__(self, vector: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            self._vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._vector.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._vector = vector

    def read(self) -> Agreement:
        if self._event is not None:
            self._event.synchronize()
        return Agreement(*self._vector.tolist())
