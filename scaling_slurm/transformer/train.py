"""READ THIS FIRST: one training run from top to bottom: topology, model, optimizer, data, trainer.

Knows no scheduler: who starts it, alone, under srun or under torchrun, hands over the run directory and the attempt.
"""

import logging
import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.loader import DataLoader, evaluation_batches
from scaling_slurm.core.optimizer.optimizer import Optimizer
from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.core.topology.layout import derive_batch
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.core.trainer.preemption import StopCause, StopListener
from scaling_slurm.core.trainer.state import Outcome
from scaling_slurm.core.trainer.trainer import Trainer
from scaling_slurm.errors import ConfigError, ExitCode, ScalingError
from scaling_slurm.log import configure
from scaling_slurm.rendezvous import Rendezvous, read_rendezvous
from scaling_slurm.run_directory import (
    Attempt,
    RunDirectory,
    exclusive,
    read_json,
    record_end,
    record_failure,
    write_atomically,
)
from scaling_slurm.settings import dump_yaml, fingerprint, load_settings
from scaling_slurm.transformer.config import RunConfig, load_run, refuse_another_model
from scaling_slurm.transformer.flops import peak_flops, training_flops_per_token
from scaling_slurm.transformer.model.model import build_layers, compute_loss

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    run: RunDirectory,
    rendezvous: Rendezvous,
    listener: StopListener,
    *,
    attempt: Attempt | None = None,
    deadline: float | None = None,
) -> Outcome:
    """Train to the last step, or until the ranks agree to stop; everything done is then in a checkpoint.

    Args:
        listener: Already listening.
        attempt: The one that the job script has claimed; None: rank 0 claims one.
        deadline: Unix time at which the scheduler ends the job, where it is known.
    """
    check_supported(config)
    if config.trainer.deterministic:
        pin_algorithms()
    if attempt is not None:
        watch(listener, run, attempt, rendezvous.rank)
    topology = Topology.initialize(
        rendezvous,
        config.topology,
        timeout=timedelta(minutes=config.trainer.timeout_minutes),
        publish=attempt.rendezvous_file if attempt is not None else None,
    )
    if attempt is None:
        attempt = topology.broadcast_object(run.claim_attempt() if topology.rank == 0 else None)
        watch(listener, run, attempt, rendezvous.rank)
    batch = derive_batch(config.trainer, topology.layout)
    master_dtype = torch.float64 if config.trainer.precision == "float64" else torch.float32
    dtype = getattr(torch, config.trainer.precision)

    model = ParallelModule(build_layers(config.model))
    model.bind(topology, seed=config.trainer.seed, dtype=master_dtype)
    parameters = model.parameter_infos()
    optimizer = Optimizer(parameters, config.optimizer, topology, dtype)
    data = TokenDataset(config.data.train, config.model.sequence_length, config.trainer.seed)
    # Opened now, so that a wrong path fails at once and not at the first evaluation.
    validation = (
        TokenDataset(config.data.validation, config.model.sequence_length, config.trainer.seed)
        if config.data.validation is not None
        else None
    )
    log.info(
        "%s parameters on %d rank(s), each %s; %s samples of %d tokens; %d micro-batch(es) of %d a step and rank",
        f"{model.num_parameters:,}",
        topology.layout.world_size,
        topology.device if topology.device.type == "cuda" else f"with {torch.get_num_threads()} thread(s)",
        f"{len(data):,}",
        config.model.sequence_length,
        batch.accumulation,
        batch.micro_batch_size,
    )

    share: dict[str, Any] = {
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "data_rank": topology.data_rank,
        "data_size": topology.layout.data,
        "vocab_size": config.model.vocab_size,
        "device": topology.device,
    }
    samples = config.trainer.evaluation_samples
    trainer = Trainer(
        config=config.trainer,
        optimizer_config=config.optimizer,
        topology=topology,
        parameters=parameters,
        optimizer=optimizer,
        compute_loss=partial(compute_loss, model),
        open_data=lambda position: DataLoader(data, start_position=position, **share),
        open_validation=None
        if validation is None
        else partial(evaluation_batches, validation, max_samples=samples, **share),
        set_training=model.train,
        run=run,
        attempt=attempt,
        listener=listener,
        run_settings=config.model_dump(mode="json"),
        data_fingerprint=data.fingerprint(),
        flops_per_token=training_flops_per_token(config.model),
        peak_flops=peak_flops(device_name(topology.device)),
        deadline=deadline,
    )
    outcome = trainer.fit()
    topology.close()
    return outcome


def device_name(device: torch.device) -> str:
    """As its driver calls it; empty for a CPU, whose peak nobody states."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def check_supported(config: RunConfig) -> None:
    """Raises ConfigError for a layout that this version plans but cannot train."""
    topology = config.topology
    if topology.tensor_parallel_size > 1 or topology.pipeline_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {topology.tensor_parallel_size} and pipeline_parallel_size "
            f"{topology.pipeline_parallel_size} cannot be trained yet",
            "this version trains with 1 and 1",
            "topology in the run file",
        )


def pin_algorithms() -> None:
    """Make a GPU run repeat to the last bit: kernels, their autotuning, and NCCL's choice of algorithm."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def watch(listener: StopListener, run: RunDirectory, attempt: Attempt, rank: int) -> None:
    """Let the listener look at the run's files too, from before the ranks have met."""
    listener.watch(
        stop_file=run.stop_file,
        notice_file=attempt.notice_file,
        is_current=lambda: run.is_current(attempt.number),
        on_superseded=lambda: leave_to_newer_attempt(attempt, rank),
    )


def leave_to_newer_attempt(attempt: Attempt, rank: int) -> None:
    """End this process at once: it may hang in a collective with ranks that are gone, and must save nothing."""
    words = f"attempt {attempt.number} has been replaced by a newer one"
    log.error("%s: leaving", words)
    record_failure(attempt, rank, words)
    logging.shutdown()
    os._exit(ExitCode.REFUSED)


def train_here(config: RunConfig, run: RunDirectory) -> None:
    """One rank of `scaling train`: alone, under torchrun, or under an srun of the user's own.

    Continues the run if its directory has checkpoints. Signals save and leave; nothing is requeued.
    """
    rendezvous = read_rendezvous()
    # All ranks share a terminal here, and they would say the same.
    configure(rendezvous.rank, logging.INFO if rendezvous.rank == 0 else logging.WARNING)
    for note in rendezvous.notes:
        log.info("%s", note)
    log.info("run directory %s", run.path)
    if run.config_file.exists():
        refuse_another_model(load_settings(RunConfig, run.config_file).value, config, run.id)
    finished = read_json(run.finished_file)
    if finished is not None and finished["step"] >= config.trainer.num_steps:
        log.info("%s is finished: step %d of %d", run.path, finished["step"], config.trainer.num_steps)
        return
    leads = rendezvous.rank == 0
    with ExitStack() as stack:
        if leads:
            run.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(run, "train"))
            write_atomically(run.config_file, dump_yaml(config))
            run.stop_file.unlink(missing_ok=True)
        outcome = train(config, run, rendezvous, stack.enter_context(StopListener()))
        if leads:
            causes = {StopCause.NONE: "finished", StopCause.STOP_FILE: "stop_file"}
            record_end(run, run.attempt(outcome.attempt), causes.get(outcome.stopped_by, "preempted"), outcome.step)


def main(arguments: list[str]) -> int:
    """`python -m scaling_slurm.transformer.train CONFIG [KEY=VALUE ...]`, for launchers that want a module."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m scaling_slurm.transformer.train CONFIG [KEY=VALUE ...]", file=sys.stderr)
        return ExitCode.CONFIG
    path, *overrides = arguments
    try:
        config = load_run(path, overrides).value.with_absolute_paths()
        train_here(config, default_run(config))
    except ScalingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


def default_run(config: RunConfig, root: Path | None = None) -> RunDirectory:
    """<root>/<name>-<fingerprint of the settings>: the same settings come back to the same run.

    Args:
        root: By default $SCALING_RUNS, else ./runs.
    """
    root = root or Path(os.environ.get("SCALING_RUNS", "runs"))
    return RunDirectory(root.absolute() / f"{config.name}-{fingerprint(config)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
