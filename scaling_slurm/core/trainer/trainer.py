"""The training loop: step, agree, evaluate, save, stop. Knows no language model and no scheduler.

Once a step all ranks add up one small vector (see `state.Agreement`). Everything that must be the same on all ranks
follows from it: the loss, the division by the tokens, the clip factor, the skip of a non-finite step, and when to stop.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.reader import choose_together, read
from scaling_slurm.core.checkpoint.writer import CheckpointWriter
from scaling_slurm.core.config import OptimizerConfig, TrainerConfig
from scaling_slurm.core.data.loader import DataTimeoutError
from scaling_slurm.core.optimizer.learning_rate import learning_rate
from scaling_slurm.core.optimizer.optimizer import Optimizer
from scaling_slurm.core.parameter import ParameterInfo
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.core.trainer.metrics import MetricsLog, memory_gib
from scaling_slurm.core.trainer.preemption import StopCause, StopListener
from scaling_slurm.core.trainer.state import Agreement, AgreementInFlight, Outcome, Progress
from scaling_slurm.errors import JobFailedError
from scaling_slurm.run_directory import Attempt, RunDirectory, append_line, write_atomically

log = logging.getLogger(__name__)

DATA_POLL_SECONDS = 1.0


class MicroBatchLike(Protocol):
    """What the loop itself reads of a micro-batch."""

    @property
    def samples(self) -> Tensor:
        """[micro batch] ids of the samples, for the record."""


Batch = TypeVar("Batch", bound=MicroBatchLike)


class Loader(Protocol[Batch]):
    """Yields this rank's micro-batches of one optimizer step after the other."""

    def next_step(self, timeout: float) -> list[Batch]:
        """Raises DataTimeoutError when nothing came within `timeout` seconds."""

    def close(self) -> None: ...


@dataclass
class Trainer(Generic[Batch]):
    """Trains a bound model to `config.num_steps`, from the newest checkpoint whose digests verify.

    Args:
        compute_loss: (micro-batch) -> (loss summed over its tokens, number of tokens), differentiable.
        open_data: (first position in the training order) -> loader.
        open_validation: () -> this rank's micro-batches of each evaluation batch; as many on every rank.
        run_settings: The resolved run, stored in each checkpoint.
        data_fingerprint: Stored in each checkpoint; a difference on resume is reported.
        flops_per_token: Of one training step; with `peak_flops` of one device it gives the model FLOPs utilisation.
        deadline: Unix time at which the scheduler ends the job, where it is known.
    """

    config: TrainerConfig
    optimizer_config: OptimizerConfig
    topology: Topology
    parameters: Sequence[ParameterInfo]
    optimizer: Optimizer
    compute_loss: Callable[[Batch], tuple[Tensor, int]]
    open_data: Callable[[int], Loader[Batch]]
    open_validation: Callable[[], Iterable[Sequence[Batch]]] | None
    set_training: Callable[[bool], Any]
    run: RunDirectory
    attempt: Attempt
    listener: StopListener
    run_settings: Mapping[str, Any]
    data_fingerprint: str
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    deadline: float | None = None
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        writes = self.topology.rank == 0
        self._checkpoints = CheckpointDirectory(self.run.checkpoints)
        self._writer = CheckpointWriter(
            self._checkpoints,
            self.topology,
            attempt=self.attempt.number,
            is_current=lambda: self.run.is_current(self.attempt.number),
        )
        self._metrics = MetricsLog(
            self.run.metrics_file if writes else None,
            self.run.tensorboard if self.config.tensorboard else None,
            self.attempt.number,
            self.config.num_steps,
            self.config.log_interval,
        )
        self._samples = self.run.samples / f"attempt-{self.attempt.number:03d}-rank-{self.topology.rank:05d}.jsonl"
        self._save_seconds = 0.0
        self._step_seconds = 0.0
        self._started = 0.0
        # On a device the host reads the agreement one step late, so that the device is not waited for.
        self._lag = 1 if self.topology.device.type == "cuda" else 0
        self._unread: list[tuple[int, AgreementInFlight]] = []
        self._gave_up = False

    # ------------------------------------------------------------------ the loop

    def fit(self) -> Outcome:
        """Train until the last step, or until all ranks agree to stop; everything done is then in a checkpoint."""
        self._restore()
        first = saved = self.progress.step
        loader = self.open_data(self.progress.consumed_samples)
        cause = AgreementInFlight(self._agree(self._vector())).read().stop
        # Loading is no part of the first step, whose seconds the deadline is reckoned with.
        self._started = time.perf_counter()
        try:
            if cause == StopCause.NONE and self.progress.evaluation_due:
                cause = self._evaluate()
            step = self.progress.step
            while cause == StopCause.NONE and step < self.config.num_steps:
                step += 1
                agreed = self._train_step(step, self._wait_for_data(loader))
                self._unread.append((step, AgreementInFlight(agreed)))
                due = step == self.config.num_steps or step % self.config.save_interval == 0
                evaluate = self._evaluation_due_after(step)
                cause = self._settle(0 if due or evaluate else self._lag)
                self.progress.evaluation_due = evaluate and self.progress.step == step
                if cause == StopCause.NONE and evaluate:
                    cause = self._evaluate()
                if cause == StopCause.NONE and due:
                    self._save()
                    saved = self.progress.step
            if cause != StopCause.NONE:
                cause = max(cause, self._settle(0))
            if saved < self.progress.step:
                self._save()
                saved = self.progress.step
        finally:
            loader.close()
            self._metrics.close()
        finished = self.progress.step >= self.config.num_steps and not self.progress.evaluation_due
        return Outcome(self.attempt.number, first, saved, StopCause.NONE if finished else cause)

    def _wait_for_data(self, loader: Loader[Batch]) -> list[Batch] | None:
        """This rank's micro-batches; None if a stop was requested meanwhile, for then the others must not wait.

        Once None, always None: data that come late belong to an earlier step than the one that asks for them.
        """
        while not self._gave_up:
            try:
                return loader.next_step(timeout=DATA_POLL_SECONDS)
            except DataTimeoutError:
                self._gave_up = self.listener.heard_elsewhere()
        return None

    def _train_step(self, step: int, batches: list[Batch] | None) -> Tensor:
        """Forward, backward, agreement and optimizer of one step; returns the agreed vector without reading it."""
        self.optimizer.zero_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        tokens = 0
        for batch in batches or ():
            loss, count = self.compute_loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
            tokens += count
        if self.config.record_samples and batches is not None:
            self._record_samples(step, batches)
        squared_norm = self.optimizer.reduce_gradients()
        agreed = self._agree(self._vector(loss_sum, tokens, squared_norm, void=batches is None))
        # Index 1 is the number of tokens, 2 the squared norm, 3 the void ranks.
        all_tokens, norm = agreed[1].clamp(min=1.0), agreed[2].sqrt()
        clipping = self.optimizer_config.gradient_clipping
        # Dividing by `scale` is the division by the tokens and torch's clip_grad_norm_ (with its 1e-6) in one.
        scale = torch.maximum(all_tokens, (norm + 1e-6 * all_tokens) / clipping) if clipping else all_tokens
        skip = ~(torch.isfinite(agreed[0]) & torch.isfinite(norm)) | (agreed[3] > 0)
        rate = learning_rate(step, self.optimizer_config, self.config.num_steps)
        self.optimizer.step(rate, grad_scale=scale, found_inf=skip)
        return agreed

    # ------------------------------------------------------------------ agreement

    def _vector(
        self, loss_sum: Tensor | float = 0.0, tokens: int = 0, squared_norm: Tensor | float = 0.0, void: bool = False
    ) -> Tensor:
        cause = self.listener.cause
        flags = (
            float(void),
            float(cause == StopCause.DEADLINE or self._deadline_is_near()),
            float(cause == StopCause.SIGNAL),
            float(cause == StopCause.STOP_FILE),
        )
        vector = torch.tensor([0.0, tokens, 0.0, *flags], dtype=torch.float64, device=self.topology.device)
        vector[0], vector[2] = loss_sum, squared_norm
        return vector

    def _agree(self, vector: Tensor) -> Tensor:
        return self.topology.all_reduce(vector)

    def _deadline_is_near(self) -> bool:
        if self.deadline is None or self.topology.rank != 0:
            return False
        return time.time() + 2 * self._save_seconds + 2 * self._step_seconds + 5 > self.deadline

    def _settle(self, keep: int) -> StopCause:
        """Read all but the newest `keep` agreements, note what they say, and return why to stop, if so."""
        cause = StopCause.NONE
        while len(self._unread) > keep:
            step, in_flight = self._unread.pop(0)
            agreement = in_flight.read()
            cause = max(cause, agreement.stop)
            if agreement.void:
                self._unread.clear()
                return max(cause, StopCause.SIGNAL)
            self._note(step, agreement)
        return cause

    def _note(self, step: int, agreement: Agreement) -> None:
        now = time.perf_counter()
        self._step_seconds, self._started = now - self._started, now
        progress = self.progress
        progress.step = step
        progress.consumed_samples += self.config.global_batch_size
        progress.consumed_tokens += int(agreement.tokens)
        tokens_per_second = agreement.tokens / self._step_seconds
        values = {
            "loss": agreement.loss_sum / max(agreement.tokens, 1.0),
            "gradient_norm": math.sqrt(agreement.squared_norm) / max(agreement.tokens, 1.0)
            if agreement.finite
            else math.nan,
            "learning_rate": learning_rate(step, self.optimizer_config, self.config.num_steps),
            "tokens": agreement.tokens,
            "consumed_samples": progress.consumed_samples,
            "step_seconds": self._step_seconds,
            "tokens_per_second": tokens_per_second,
            "memory_gib": memory_gib(self.topology.device),
        }
        if self.peak_flops is not None:
            peak = self.peak_flops * self.topology.layout.world_size
            values["mfu"] = tokens_per_second * self.flops_per_token / peak
        if agreement.finite:
            progress.skipped_in_a_row = 0
        else:
            progress.skipped_steps += 1
            progress.skipped_in_a_row += 1
            values["skipped"] = 1.0
            log.warning("step %d had a non-finite loss or gradient and was skipped on all ranks", step)
        self._metrics.write("training", step, values)
        if progress.skipped_in_a_row > self.config.max_skipped_steps:
            raise JobFailedError(
                f"{progress.skipped_in_a_row} steps in a row up to step {step} had a non-finite loss or gradient",
                f"at most {self.config.max_skipped_steps} are skipped; a lower optimizer.learning_rate may help",
                "trainer.max_skipped_steps in the run file",
            )

    def _record_samples(self, step: int, batches: Sequence[Batch]) -> None:
        self._samples.parent.mkdir(exist_ok=True)
        ids = [int(sample) for batch in batches for sample in batch.samples]
        append_line(self._samples, {"step": step, "samples": ids})

    # ------------------------------------------------------------------ evaluation

    def _evaluation_due_after(self, step: int) -> bool:
        interval = self.config.evaluation_interval
        return self.open_validation is not None and interval is not None and step % interval == 0

    def _evaluate(self) -> StopCause:
        """Mean loss over the validation batches; left early, without a result, when the ranks agree to stop."""
        assert self.open_validation is not None
        begun = time.perf_counter()
        loss_sum = tokens = 0.0
        self.set_training(False)
        try:
            for batches in self.open_validation():
                with torch.no_grad():
                    losses = [self.compute_loss(batch) for batch in batches]
                zero = torch.zeros((), dtype=torch.float64, device=self.topology.device)
                own = sum((loss.double() for loss, _ in losses), zero)
                vector = self._vector(own, sum(count for _, count in losses))
                agreement = AgreementInFlight(self._agree(vector)).read()
                if agreement.stop != StopCause.NONE:
                    return agreement.stop
                loss_sum += agreement.loss_sum
                tokens += agreement.tokens
        finally:
            self.set_training(True)
        self.progress.evaluation_due = False
        seconds = time.perf_counter() - begun
        values = {"loss": loss_sum / max(tokens, 1.0), "tokens": tokens, "seconds": seconds}
        self._metrics.write("evaluation", self.progress.step, values)
        self._started = time.perf_counter()
        return StopCause.NONE

    # ------------------------------------------------------------------ checkpoints

    def _restore(self) -> None:
        """Load the newest checkpoint that verifies, if there is one; all ranks load the same."""
        self.run.checkpoints.mkdir(parents=True, exist_ok=True)
        if self.topology.rank == 0:
            self._checkpoints.remove_stale_temporaries(self.attempt.number)
            # A folder that cannot be written to is found now, not at the first save hours later.
            write_atomically(self.run.checkpoints / ".writable", "")
            (self.run.checkpoints / ".writable").unlink()
        self.topology.barrier()
        checkpoint = choose_together(self._checkpoints, self.topology)
        if checkpoint is not None:
            self._load(checkpoint)
        else:
            log.info("starting at step 0: no checkpoint yet")
        if self.topology.rank == 0:
            write_atomically(self.attempt.start_file, json.dumps({"time": time.time(), "step": self.progress.step}))

    def _load(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        read(checkpoint, self.optimizer.named_state())
        self.optimizer.load_state_scalars(manifest.state["optimizer"])
        self.progress = Progress(**manifest.state["progress"])
        self.progress.evaluation_due &= self.open_validation is not None
        if manifest.data_fingerprint != self.data_fingerprint:
            log.warning(
                "the training data differ from those of %s: fingerprint %s, there %s; going on with the new ones",
                checkpoint.name,
                self.data_fingerprint,
                manifest.data_fingerprint,
            )
        log.info("continuing after step %d from %s", self.progress.step, checkpoint.name)

    def _save(self) -> None:
        state = {"progress": asdict(self.progress), "optimizer": self.optimizer.state_scalars()}
        report = self._writer.save(
            self.progress.step,
            self.optimizer.named_state(),
            self.parameters,
            state=state,
            config=dict(self.run_settings),
            data_fingerprint=self.data_fingerprint,
        )
        self._save_seconds = max(self._save_seconds, report.seconds)
        log.info("saved step %d: %.1f MB in %.2f s", self.progress.step, report.bytes / 1e6, report.seconds)
        self._started = time.perf_counter()
