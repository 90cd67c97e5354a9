"""Where a run's numbers go: metrics.jsonl always, the console, TensorBoard. Written by rank 0. Knows no training."""

import logging
import math
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from scaling_slurm.errors import ConfigError
from scaling_slurm.run_directory import append_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class MetricsLog:
    """Appends one record a step; nothing is rewritten, so after a resume the last attempt of a step counts.

    Args:
        path: metrics.jsonl; None on ranks that write nothing.
        tensorboard: Folder of TensorBoard files, or None.
        attempt: Written into each record.
        num_steps: Of the run, for the console line.
        interval: Steps between console lines, which show means over these steps.
    """

    def __init__(
        self, path: Path | None, tensorboard: Path | None, attempt: int, num_steps: int, interval: int
    ) -> None:
        self.path, self.attempt, self.num_steps, self.interval = path, attempt, num_steps, interval
        self._since_line: list[Mapping[str, float]] = []
        self._writer = _open_tensorboard(tensorboard) if path is not None and tensorboard is not None else None

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One record of `kind` ("training" or "evaluation")."""
        if self.path is None:
            return
        # JSON has no NaN: a value that is not finite is null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"kind": kind, "step": step, "attempt": self.attempt, "time": time.time()}
        try:
            append_line(self.path, record | finite)
        except OSError as error:
            log.error("step %d is missing in %s: %s", step, self.path, error.strerror)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)
        if kind == "training":
            self._since_line.append(values)
            if step % self.interval and step != self.num_steps:
                return
            values, self._since_line = _over_steps(self._since_line), []
        shown = "  ".join(f"{name} {_short(value)}" for name, value in values.items() if name in _CONSOLE)
        log.info("%s  step %d/%d  %s", kind, step, self.num_steps, shown)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _open_tensorboard(folder: Path) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "trainer.tensorboard is true, but the package tensorboard is not installed",
            "pip install 'scaling-slurm[tensorboard]'",
            "or leave trainer.tensorboard out of the run file",
        ) from None
    return SummaryWriter(str(folder))


_CONSOLE = ("loss", "gradient_norm", "learning_rate", "step_seconds", "tokens_per_second", "mfu", "memory_gib")


def _over_steps(records: list[Mapping[str, float]]) -> dict[str, float]:
    """Means over several steps, of what is a mean; the last value of the rest."""
    means = dict(records[-1])
    for name in ("loss", "gradient_norm", "step_seconds", "mfu"):
        if name in means:
            means[name] = sum(record.get(name, math.nan) for record in records) / len(records)
    if "tokens" in means and means.get("step_seconds"):
        means["tokens_per_second"] = sum(r["tokens"] for r in records) / sum(r["step_seconds"] for r in records)
    return means


def _short(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) < 1e-2 else f"{value:.4f}"
