import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scaling_slurm.core.config import OptimizerConfig, TrainerConfig
from scaling_slurm.core.data.loader import DataTimeoutError
from scaling_slurm.core.optimizer.learning_rate import learning_rate
from scaling_slurm.core.optimizer.optimizer import Optimizer
from scaling_slurm.core.pipeline.parallel_module import LayerSpec, ParallelModule
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.core.trainer.preemption import StopCause, StopListener
from scaling_slurm.core.trainer.state import Outcome
from scaling_slurm.core.trainer.trainer import Trainer
from scaling_slurm.errors import JobFailedError
from scaling_slurm.run_directory import RunDirectory, read_lines
from tests.support.distributed import run_ranks

OPTIMIZER = OptimizerConfig(
    learning_rate=0.05, minimum_learning_rate=0.001, warmup_steps=3, weight_decay=0.1, gradient_clipping=0.5
)
STEPS, BATCH = 12, 4


@dataclass
class ToyBatch:
    samples: Tensor
    inputs: Tensor
    targets: Tensor
    weights: Tensor
    """How many tokens each sample stands for, which differs from sample to sample."""


def toy_batch(ids: list[int]) -> ToyBatch:
    generators = [torch.Generator().manual_seed(i) for i in ids]
    inputs = torch.stack([torch.randn(5, generator=g, dtype=torch.float64) for g in generators])
    return ToyBatch(torch.tensor(ids), inputs, inputs.sin().sum(1), torch.tensor([1 + i % 3 for i in ids]))


@dataclass
class ToyLoader:
    """One sample a micro-batch. `stall_at`: the global step from whose data on nothing comes any more."""

    position: int
    data_rank: int
    data_size: int
    stall_at: int | None = None
    before_step: dict[int, Callable[[], None]] = field(default_factory=dict)

    def next_step(self, timeout: float) -> list[ToyBatch]:
        step = self.position // BATCH + 1
        action = self.before_step.pop(step, None)
        if action is not None:
            action()
        if self.stall_at is not None and step >= self.stall_at:
            time.sleep(0.05)
            raise DataTimeoutError
        ids = range(self.position + self.data_rank, self.position + BATCH, self.data_size)
        self.position += BATCH
        return [toy_batch([i]) for i in ids]

    def close(self) -> None:
        pass


def toy_model(topology: Topology) -> ParallelModule:
    layers = [
        LayerSpec("first", partial(nn.Linear, 5, 8)),
        LayerSpec("act", nn.Tanh),
        LayerSpec("last", partial(nn.Linear, 8, 1)),
    ]
    return ParallelModule(layers).bind(topology, seed=1, dtype=torch.float64)


def toy_loss(model: nn.Module, batch: ToyBatch) -> tuple[Tensor, int]:
    errors = (model(batch.inputs).squeeze(1) - batch.targets).square()
    return (errors * batch.weights).sum(), int(batch.weights.sum())


def toy_validation(data_rank: int, data_size: int) -> Iterator[list[ToyBatch]]:
    for first in (1000, 1004):
        yield [toy_batch([i]) for i in range(first + data_rank, first + BATCH, data_size)]


def train(
    topology: Topology,
    path: Path,
    *,
    stall_at: int | None = None,
    signal_at: int | None = None,
    signal_rank: int = 0,
    poison: tuple[int, ...] = (),
    lag: int | None = None,
    before: dict[int, Callable[[], None]] | None = None,
    validate: bool = True,
    deadline: float | None = None,
    **changes: object,
) -> Outcome:
    settings = {"num_steps": STEPS, "global_batch_size": BATCH, "save_interval": 5, "precision": "float64"}
    config = TrainerConfig.model_validate(settings | changes)
    run = RunDirectory(path)
    run.path.mkdir(exist_ok=True)
    attempt = topology.broadcast_object(run.claim_attempt() if topology.rank == 0 else None)
    model = toy_model(topology)
    parameters = model.parameter_infos()
    with StopListener() as listener:
        listener.watch(
            stop_file=run.stop_file,
            notice_file=attempt.notice_file,
            is_current=lambda: True,
            on_superseded=lambda: None,
        )

        def interrupt() -> None:
            if topology.rank == signal_rank:
                os.kill(os.getpid(), signal.SIGTERM)
                while listener.cause == StopCause.NONE:
                    time.sleep(0.01)

        def open_data(position: int) -> ToyLoader:
            actions = {} if signal_at is None else {signal_at: interrupt}
            actions |= before or {}
            stalls = stall_at if topology.rank == topology.layout.world_size - 1 else None
            return ToyLoader(position, topology.data_rank, topology.layout.data, stalls, actions)

        def compute_loss(batch: ToyBatch) -> tuple[Tensor, int]:
            loss, count = toy_loss(model, batch)
            return (loss * float("nan"), count) if batch.samples.item() in poison else (loss, count)

        trainer = Trainer(
            config=config,
            optimizer_config=OPTIMIZER,
            topology=topology,
            parameters=parameters,
            optimizer=Optimizer(parameters, OPTIMIZER, topology, torch.float64),
            compute_loss=compute_loss,
            open_data=open_data,
            open_validation=partial(toy_validation, topology.data_rank, topology.layout.data) if validate else None,
            set_training=model.train,
            run=run,
            attempt=attempt,
            listener=listener,
            run_settings={},
            data_fingerprint="toy",
            deadline=deadline,
        )
        if lag is not None:
            trainer._lag = lag
        return trainer.fit()


def losses(path: Path, kind: str = "training") -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_lines(RunDirectory(path).metrics_file) if r["kind"] == kind}


def plain_losses() -> list[float]:
    """The same training in plain PyTorch on one process: whole batches, mean loss, clip_grad_norm_, AdamW."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    bound = toy_model(Topology())
    with torch.no_grad():
        for target, info in zip(model.parameters(), bound.parameter_infos(), strict=True):
            target.copy_(info.parameter)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.epsilon)
    found = []
    for step in range(1, STEPS + 1):
        batch = toy_batch(list(range((step - 1) * BATCH, step * BATCH)))
        loss, count = toy_loss(model, batch)
        optimizer.zero_grad()
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clipping)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, OPTIMIZER, STEPS)
        optimizer.step()
        found.append(float(loss.detach() / count))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_equal_plain_pytorch_on_one_process(tmp_path, world_size):
    if world_size == 1:
        train(Topology(), tmp_path / "run")
    else:
        run_ranks(world_size, train, tmp_path / "run")
    assert list(losses(tmp_path / "run").values()) == pytest.approx(plain_losses(), rel=1e-9)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train(Topology(), path, evaluation_interval=4)
    return path


def test_every_step_is_evaluated_and_saved_on_its_interval_and_at_the_end(uninterrupted):
    saved = sorted(p.name[:13] for p in RunDirectory(uninterrupted).checkpoints.glob("step-*"))
    assert saved == ["step-00000005", "step-00000010", "step-00000012"]
    assert list(losses(uninterrupted, "evaluation")) == [4, 8, 12]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("signal_at", [1, 4, 5, 7, 12])
def test_a_signal_at_any_step_changes_no_bit(tmp_path, uninterrupted, signal_at, lag):
    """Step 4 has an evaluation, step 5 a save, 12 is the last; with a lag the host learns late, as on a GPU."""
    first = train(Topology(), tmp_path / "run", evaluation_interval=4, signal_at=signal_at, lag=lag)
    done = min(signal_at + lag, STEPS) if signal_at % 4 and signal_at % 5 else signal_at
    assert (first.step, first.first_step) == (done, 0)
    second = train(Topology(), tmp_path / "run", evaluation_interval=4, lag=lag)
    assert (second.first_step, second.step, second.stopped_by) == (done, STEPS, StopCause.NONE)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert losses(tmp_path / "run", "evaluation") == losses(uninterrupted, "evaluation")


def test_one_save_and_no_step_more_than_agreed(tmp_path):
    outcome = train(Topology(), tmp_path / "run", signal_at=5)
    assert outcome.stopped_by == StopCause.SIGNAL
    assert [p.name for p in RunDirectory(tmp_path / "run").checkpoints.glob("step-*")] == ["step-00000005-attempt-001"]


def touch_stop_file(run: RunDirectory) -> None:
    run.stop_file.touch()
    time.sleep(1.5)  # the listener looks once a second


def test_the_stop_file_stops_the_run_for_good(tmp_path):
    run = RunDirectory(tmp_path / "run")
    outcome = train(Topology(), run.path, before={3: partial(touch_stop_file, run)})
    assert (outcome.step, outcome.stopped_by) == (3, StopCause.STOP_FILE)


@pytest.mark.parametrize("signal_rank", [0, 1])
def test_one_rank_alone_gets_the_signal_and_all_leave_at_one_step(tmp_path, uninterrupted, signal_rank):
    first = run_ranks(2, partial(train, signal_at=7, signal_rank=signal_rank), tmp_path / "run")
    assert [(o.step, o.stopped_by) for o in first] == [(7, StopCause.SIGNAL)] * 2
    second = run_ranks(2, train, tmp_path / "run")
    assert [o.first_step for o in second] == [7, 7]
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), rel=1e-12)


def signal_late(topology: Topology, path: Path) -> Outcome:
    """Rank 1 waits for data that never come; rank 0 gets the signal while it waits for rank 1 in the collective."""
    import threading

    if topology.rank == 0:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    return train(topology, path, stall_at=7)


def test_a_signal_reaches_a_rank_that_waits_for_its_data(tmp_path, uninterrupted):
    outcomes = run_ranks(2, signal_late, tmp_path / "run", timeout=30)
    assert [(o.step, o.stopped_by) for o in outcomes] == [(6, StopCause.SIGNAL)] * 2
    assert [o.first_step for o in run_ranks(2, train, tmp_path / "run")] == [6, 6]
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), rel=1e-12)


def stop_and_stall_once(run: RunDirectory) -> None:
    run.stop_file.touch()
    raise DataTimeoutError


def test_data_that_come_after_a_rank_gave_up_waiting_are_not_trained_on(tmp_path, uninterrupted):
    """With a lag the next step is already under way when the void one is read, and its data may be there."""
    run = RunDirectory(tmp_path / "run")
    first = train(Topology(), run.path, lag=1, before={7: partial(stop_and_stall_once, run)})
    assert (first.step, first.stopped_by) == (6, StopCause.STOP_FILE)
    run.stop_file.unlink()
    assert train(Topology(), run.path, lag=1).first_step == 6
    assert losses(run.path) == losses(uninterrupted)


def test_the_deadline_stops_the_run_in_time(tmp_path, uninterrupted, monkeypatch):
    real = time.time
    later = {4: lambda: monkeypatch.setattr(time, "time", lambda: real() + 1000)}
    outcome = train(Topology(), tmp_path / "run", deadline=real() + 1000, before=later)
    assert (outcome.step, outcome.stopped_by) == (4, StopCause.DEADLINE)
    monkeypatch.undo()
    assert train(Topology(), tmp_path / "run", deadline=real() + 1000).stopped_by == StopCause.NONE
    assert losses(tmp_path / "run") == losses(uninterrupted)


def test_loading_is_no_part_of_the_first_steps_time(tmp_path, monkeypatch):
    """Else a slow load would look like slow steps, and stop the run long before its deadline."""
    restore = Trainer._restore
    monkeypatch.setattr(Trainer, "_restore", lambda trainer: (restore(trainer), time.sleep(0.5)))
    train(Topology(), tmp_path / "run", num_steps=3)
    assert next(read_lines(RunDirectory(tmp_path / "run").metrics_file))["step_seconds"] < 0.5


def test_an_evaluation_that_was_due_is_forgotten_without_validation_data(tmp_path):
    first = train(Topology(), tmp_path / "run", num_steps=4, evaluation_interval=4, signal_at=4)
    assert (first.step, first.stopped_by) == (4, StopCause.SIGNAL)
    second = train(Topology(), tmp_path / "run", num_steps=4, validate=False)
    assert (second.step, second.stopped_by) == (4, StopCause.NONE)


def test_a_non_finite_step_is_skipped_and_training_goes_on(tmp_path):
    train(Topology(), tmp_path / "run", poison=(9,))
    records = [r for r in read_lines(RunDirectory(tmp_path / "run").metrics_file) if r["kind"] == "training"]
    assert [r["step"] for r in records if r.get("skipped")] == [3]
    assert len(records) == STEPS
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in records if r["step"] != 3)


def test_a_non_finite_step_on_one_rank_is_skipped_on_all(tmp_path):
    run_ranks(2, partial(train, poison=(9,)), tmp_path / "two")
    train(Topology(), tmp_path / "one", poison=(9,))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert {s: v for s, v in two.items() if s != 3} == pytest.approx(
        {s: v for s, v in one.items() if s != 3}, rel=1e-12
    )


def test_too_many_skipped_steps_end_the_run_with_the_numbers(tmp_path):
    with pytest.raises(JobFailedError, match="2 steps in a row up to step 4 had a non-finite loss or gradient"):
        train(Topology(), tmp_path / "run", poison=(9, 13), max_skipped_steps=1)


def test_samples_are_recorded_by_rank_and_attempt(tmp_path):
    run_ranks(2, partial(train, record_samples=True, num_steps=2), tmp_path / "run")
    files = sorted(RunDirectory(tmp_path / "run").samples.iterdir())
    assert [f.name for f in files] == ["attempt-001-rank-00000.jsonl", "attempt-001-rank-00001.jsonl"]
    assert [json.loads(line)["samples"] for line in files[1].read_text().splitlines()] == [[1, 3], [5, 7]]
