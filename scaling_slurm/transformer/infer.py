"""From a run, or one of its checkpoints, to a model that continues text.

Knows no scheduler and meets no other process: whatever the surroundings say, it is alone on one device.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.reader import CheckpointReader
from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import ConfigError, NotFoundError, RefusedError
from scaling_slurm.run_directory import RunDirectory
from scaling_slurm.transformer.config import RunConfig
from scaling_slurm.transformer.inference.engine import Engine, FinishReason, Generation
from scaling_slurm.transformer.inference.sampling import SamplingConfig
from scaling_slurm.transformer.model.model import build_layers
from scaling_slurm.transformer.text.tokenizer import StreamDecoder, Tokenizer

log = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Completion(Iterator[str]):
    """The continuation of one prompt, in pieces that never split a character; joined they are the whole text."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation, self._decoder = generation, StreamDecoder(tokenizer)
        self.num_tokens = 0

    def __next__(self) -> str:
        for token in self._generation:
            self.num_tokens += 1
            if piece := self._decoder.push(token):
                return piece
        if rest := self._decoder.flush():
            return rest
        raise StopIteration

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set once there is no more text."""
        return self._generation.finish_reason


@dataclass(frozen=True)
class LanguageModel:
    """A trained model with its tokenizer."""

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint

    def complete(self, prompt: str, *, max_tokens: int, sampling: SamplingConfig | None = None) -> Completion:
        """Continue a text until the model ends the document; an empty one: begin a document.

        Raises ConfigError for a prompt that is longer than the model's context.
        """
        end = self.tokenizer.end_of_document_id
        # In training the end of a document stands in front of the next one.
        tokens = self.tokenizer.encode(prompt) or [end]
        generation = self.engine.generate(tokens, max_tokens=max_tokens, stop_tokens=[end], sampling=sampling)
        return Completion(generation, self.tokenizer)


def load_model(
    path: Path | str, *, device: str | None = None, precision: str | None = None, tokenizer: Path | None = None
) -> LanguageModel:
    """Load the newest whole checkpoint of a run, or the given one; reads its weights and nothing of the optimizer.

    Args:
        path: A run directory or a checkpoint's.
        device: Such as "cpu" or "cuda:1"; by default a GPU where there is one.
        precision: Of weights and activations, by default as in training.
        tokenizer: A tokenizer.json, by default the run's.
    """
    checkpoint = find_checkpoint(Path(path))
    try:
        config = RunConfig.model_validate(checkpoint.manifest.config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{checkpoint.path} was written with settings that this version does not know: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            "use the version that trained it",
        ) from error
    words = load_tokenizer(config, tokenizer)
    model = load_weights(config, checkpoint, select_device(device), select_precision(precision, config))
    return LanguageModel(Engine(model, config.model), words, checkpoint)


def find_checkpoint(path: Path) -> Checkpoint:
    """The newest checkpoint under a run directory whose weights are whole, or the one at `path`.

    A run's folder of checkpoints, and `latest` in it, stand for the run: what `latest` says may be out of date.
    Raises NotFoundError where there is none, RefusedError where all are damaged.
    """
    path = Path(os.path.abspath(path))
    if path.name == "latest" and not RunDirectory(path).config_file.is_file():
        path = path.parent
    above = RunDirectory(path.parent)
    if path == above.checkpoints and above.config_file.is_file():
        path = above.path
    path = path.resolve()
    run = RunDirectory(path)
    if run.config_file.is_file():
        committed = CheckpointDirectory(run.checkpoints).committed()
    else:
        beside = CheckpointDirectory(path.parent).committed()
        committed = [one for one in beside if one.path == path] or CheckpointDirectory(path).committed()
        if not committed and (beside or path.parent == RunDirectory(path.parent.parent).checkpoints):
            there = f"there are {', '.join(one.name for one in beside[:5])}" if beside else "there are none"
            wrong = f"{path.name} was never completed" if path.is_dir() else f"no such checkpoint: {path.name}"
            raise NotFoundError(wrong, there, f"in {path.parent}")
        if not committed:
            raise NotFoundError(
                f"{path} is neither a run nor a checkpoint", "name a directory with a whole manifest.json"
            )
    if not committed:
        raise NotFoundError(
            f"{run.id} has no checkpoint yet",
            "one is saved every trainer.save_interval steps and when the run ends",
            f"`scaling status {run.id}` shows how far it is",
        )
    for checkpoint in committed:
        problems = _weight_problems(checkpoint)
        if not problems:
            return checkpoint
        log.warning("checkpoint %s is passed over: %s", checkpoint.name, "; ".join(problems))
    raise RefusedError(f"no checkpoint of {path} is whole: {', '.join(one.name for one in committed)}")


def _weight_problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with the manifest or with a file that holds weights; optimizer state need not be there."""
    if problems := checkpoint.problems():
        return problems
    files = checkpoint.manifest.files
    names = sorted({entry.file for entry in checkpoint.manifest.entries if entry.kind == "weight"})
    checked = (checkpoint.file_problem(name, files[name]) for name in names)
    return [problem for problem in checked if problem]


def load_weights(config: RunConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> ParallelModule:
    """The run's model with the checkpoint's weights, cast to `dtype` one tensor after the other."""
    # Dropout does not act here, so nothing should warn of what it costs.
    model_config = config.model.model_copy(update={"attention_dropout": 0.0})
    model = ParallelModule(build_layers(model_config)).bind(Topology(device=device), seed=0, dtype=dtype)
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for info in model.parameter_infos():
            whole = tuple((0, size) for size in info.shape)
            info.parameter.copy_(reader.read_box("weight", info.name, whole))
    return model


def load_tokenizer(config: RunConfig, path: Path | None = None) -> Tokenizer:
    """The given tokenizer.json, else the run's, else the one beside its token files."""
    path = path or config.data.tokenizer or config.data.train.parent / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(
            f"there is no tokenizer {path}", "the tokenizer.json that the data was prepared with", "--tokenizer"
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{path} has {tokenizer.vocab_size} ids, the model {config.model.vocab_size}",
            "the tokenizer.json that the data was prepared with",
            "--tokenizer",
        )
    return tokenizer


def select_device(name: str | None) -> torch.device:
    """The named device, or a GPU (CUDA or ROCm) where there is one; raises ConfigError where it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device {name!r} cannot be used: {reason}", '"cpu", "cuda" or "cuda:1"', "--device"
        ) from None
    return device


def select_precision(name: str | None, config: RunConfig) -> torch.dtype:
    """The dtype of a precision; None: that of the training."""
    name = name or config.trainer.precision
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r}", f"one of {', '.join(PRECISIONS)}", "--precision")
    return PRECISIONS[name]
