"""Small language models for the tests."""

from pathlib import Path

import torch

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.writer import CheckpointWriter
from scaling_slurm.core.data.loader import MicroBatch
from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.settings import dump_yaml
from scaling_slurm.transformer.config import ModelConfig, RunConfig
from scaling_slurm.transformer.model.model import build_layers, compute_loss
from scaling_slurm.transformer.text.tokenizer import Tokenizer


def small_config(**changes: object) -> ModelConfig:
    settings: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "sequence_length": 24,
        # Large, so that what the layers do is far above rounding.
        "init_std": 0.3,
    }
    return ModelConfig.model_validate(settings | changes)


def bound_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> ParallelModule:
    """On the CPU, alone."""
    return ParallelModule(build_layers(config)).bind(Topology(), seed=seed, dtype=dtype)


def random_tokens(*shape: int, config: ModelConfig, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def write_run(path: Path, text: str, *, step: int = 7) -> RunConfig:
    """A run directory with a tokenizer and one checkpoint of a model that knows `text`, one document, by heart."""
    tokenizer = Tokenizer.train([text], 280)
    (path / "data").mkdir(parents=True)
    tokenizer.save(path / "data" / "tokenizer.json")
    end = tokenizer.end_of_document_id
    tokens = torch.tensor([[end, *tokenizer.encode(text), end]])
    model_config = small_config(vocab_size=tokenizer.vocab_size, sequence_length=tokens.shape[1] + 8, init_std=0.05)
    config = RunConfig.model_validate(
        {
            "name": "small",
            "model": model_config.model_dump(),
            "data": {"train": str(path / "data" / "train")},
            "trainer": {"num_steps": 10, "global_batch_size": 1},
        }
    )
    (path / "config.yaml").write_text(dump_yaml(config))
    model = bound_model(model_config, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for index in range(160):
        rows = tokens[:, index % 2 :]  # a prompt does not begin with the end of a document
        loss, count = compute_loss(model, MicroBatch(rows, torch.zeros(1, dtype=torch.int64), torch.zeros(1)))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    save_weights(path, config, model, step)
    return config


def save_weights(path: Path, config: RunConfig, model: ParallelModule, step: int) -> Checkpoint:
    """A checkpoint as the trainer writes it, moments included."""
    infos = model.parameter_infos()
    tensors = {f"weight/{info.name}": info.parameter.detach() for info in infos}
    tensors |= {f"{kind}/{info.name}": torch.ones(info.shape) for info in infos for kind in ("exp_avg", "exp_avg_sq")}
    directory = CheckpointDirectory(path / "checkpoints")
    directory.path.mkdir(exist_ok=True)
    writer = CheckpointWriter(directory, Topology(), attempt=1, is_current=lambda: True)
    settings = config.model_dump(mode="json")
    return writer.save(step, tensors, infos, state={}, config=settings, data_fingerprint="").checkpoint
