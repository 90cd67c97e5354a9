"""What would refuse a job or let it fail after hours in the queue, found on the login node: model, data, memory, disk.

The site's limits are checked by slurm/job.py. Everything here only reads.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from scaling_slurm.core.topology.layout import Layout
from scaling_slurm.errors import ConfigError
from scaling_slurm.run_directory import read_json
from scaling_slurm.slurm.cluster import ClusterProfile
from scaling_slurm.slurm.job import JobRequest
from scaling_slurm.transformer.config import DataConfig, ModelConfig, RunConfig
from scaling_slurm.transformer.flops import MemoryEstimate, checkpoint_bytes

TIGHT, TOO_MUCH = 0.9, 1.2
"""Shares of a GPU's memory: above the first the plan says so, above the second it is refused. It is an estimate."""
FREE_INODES = 1000
"""Files that a run may want beside those of its ranks."""


def model_problems(model: ModelConfig, layout: Layout) -> Iterator[ConfigError]:
    """Sizes that the layout does not divide."""
    shared = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    for name, count in shared.items():
        if count % layout.tensor:
            yield ConfigError(
                f"{name} {count} is not divisible by tensor_parallel_size {layout.tensor}",
                "each tensor rank holds an equal share",
                f"topology.tensor_parallel_size or model.{name} in the run file",
            )
    if model.num_layers < layout.pipeline:
        yield ConfigError(
            f"pipeline_parallel_size {layout.pipeline} is above num_layers {model.num_layers}",
            "each stage needs a layer",
            "topology.pipeline_parallel_size in the run file",
        )


def unsupported_layout(layout: Layout) -> Iterator[ConfigError]:
    """Layouts that this version plans and cannot train."""
    if layout.tensor > 1 or layout.pipeline > 1:
        yield ConfigError(
            f"tensor_parallel_size {layout.tensor} and pipeline_parallel_size {layout.pipeline} can be planned only",
            "this version trains with tensor and pipeline size 1 only",
            "topology in the run file",
        )


def unusable_data(config: RunConfig, origins: Mapping[str, str]) -> Iterator[ConfigError]:
    """Files that are not here, damaged or too short; paths are absolute."""
    data = config.data
    for name, prefix in (("train", data.train), ("validation", data.validation)):
        if prefix is None:
            continue
        where = f"data.{name} in {origins.get(f'data.{name}', 'the run file')}"
        missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not Path(f"{prefix}{suffix}").is_file()]
        if missing:
            wrong = f"{' and '.join(missing)} not found"
            yield ConfigError(wrong, "`scaling prepare` makes token files from text", where)
            continue
        from scaling_slurm.core.data.dataset import TokenDataset  # numpy takes its time to import

        try:
            TokenDataset(prefix, config.model.sequence_length, config.trainer.seed)
        except ConfigError as error:
            yield ConfigError(error.wrong, error.right, where)
    if data.tokenizer and not data.tokenizer.is_file():
        yield ConfigError(f"{data.tokenizer} not found", "name a tokenizer.json", "data.tokenizer in the run file")


def data_problems(data: DataConfig, vocab_size: int) -> Iterator[ConfigError]:
    """Token ids that the embedding does not have."""
    prefixes = filter(None, (data.train, data.validation))
    largest, prefix = max(((_largest_token_id(prefix), prefix) for prefix in prefixes), key=lambda pair: pair[0])
    if largest >= vocab_size:
        yield ConfigError(
            f"{prefix} holds token id {largest}, but vocab_size is {vocab_size}",
            f"vocab_size must be at least {largest + 1}",
            "model.vocab_size in the run file",
        )


def _largest_token_id(prefix: Path) -> int:
    """As `scaling prepare` noted it; -1 for token files from elsewhere."""
    files = (read_json(prefix.with_name("data.json")) or {}).get("files")
    record = files.get(prefix.name) if isinstance(files, dict) else None
    largest = record.get("largest_token_id") if isinstance(record, dict) else None
    return largest if isinstance(largest, int) else -1


def memory_problems(memory: MemoryEstimate, profile: ClusterProfile) -> Iterator[ConfigError]:
    """An estimate far above what a GPU has."""
    if _memory_share(memory, profile) > TOO_MUCH:
        yield ConfigError(
            f"the run needs {_describe_share(memory, profile)}",
            "use a smaller micro batch, more tensor or pipeline ranks, or a smaller model",
            "trainer.micro_batch_size, topology or model in the run file",
        )


def _memory_share(memory: MemoryEstimate, profile: ClusterProfile) -> float:
    """Of a GPU's memory; 0 where that is not known."""
    return memory.total / (profile.gpu.memory_gib * 2**30) if profile.gpu.memory_gib else 0.0


def _describe_share(memory: MemoryEstimate, profile: ClusterProfile) -> str:
    size = f"about {gib(memory.total)} a rank on a GPU of {profile.gpu.memory_gib:g} GiB"
    return f"{size} ({_memory_share(memory, profile):.0%})"


def path_problems(run_directory: Path, runs_root: Path) -> Iterator[ConfigError]:
    """A name that leads out of the folder of runs; characters that Slurm or submitit would take for something else."""
    if run_directory.parent != runs_root or run_directory.name in ("", ".", ".."):
        yield ConfigError(f"{run_directory} is not directly in {runs_root}", "a run's name is no path", "--name")
    characters = re.compile(r"[%\\'\"]")
    refused = sorted(set(characters.findall(str(run_directory))))
    if not str(run_directory).isprintable():
        refused.append("a control character")
    if refused:
        yield ConfigError(
            f"the run directory {str(run_directory)!r} holds {' '.join(refused)}",
            "Slurm and submitit give these characters a meaning in file names",
            "--name" if characters.search(run_directory.name) else "--runs, or runs_directory in the cluster profile",
        )


def storage_problems(config: RunConfig, request: JobRequest, run_directory: Path) -> Iterator[ConfigError]:
    """No permission, or no room for two checkpoints: the newest is kept until the next one is complete."""
    existing = next(folder for folder in run_directory.parents if folder.exists())
    where = "--runs, or runs_directory in the cluster profile"
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield ConfigError(f"{existing} cannot be written to", "run directories are made there", where)
        return
    free = os.statvfs(existing)
    needed = 2 * checkpoint_bytes(config.model, config.trainer.precision)
    if free.f_bavail * free.f_frsize < needed:
        yield ConfigError(
            f"{existing} has {gib(free.f_bavail * free.f_frsize)} free, and two checkpoints need {gib(needed)}",
            "make room, or use another file system",
            where,
        )
    inodes = FREE_INODES + 10 * request.num_tasks
    if free.f_files and free.f_favail < inodes:
        yield ConfigError(
            f"{existing} has room for {free.f_favail} files, and a run needs {inodes}", "make room", where
        )


def find_notes(
    config: RunConfig, request: JobRequest, profile: ClusterProfile, memory: MemoryEstimate, run_directory: Path
) -> Iterator[str]:
    """What deserves a look, and refuses nothing."""
    if TIGHT < _memory_share(memory, profile) <= TOO_MUCH:
        yield f"memory is tight: {_describe_share(memory, profile)}"
    tokenizer = config.data.train.with_name("tokenizer.json")
    if config.data.tokenizer is None and not tokenizer.is_file():
        yield f"{tokenizer} not found: training does not need it, `scaling infer` will"
    if config.optimizer.warmup_steps > config.trainer.num_steps:
        yield (
            f"the run ends in its warm-up: optimizer.warmup_steps {config.optimizer.warmup_steps} is above "
            f"trainer.num_steps {config.trainer.num_steps}"
        )
    if request.time is None:
        yield "no time limit is set, so the site's default counts; --time sets one"
    if not request.requeue:
        yield "the job is not requeued: after a stop, `scaling resume` continues it"
    if profile.scheduler == "slurm" and request.nodes > 1 and run_directory.is_relative_to("/tmp"):
        yield f"{run_directory} must be on a file system that all nodes share, and /tmp rarely is"


def gib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
