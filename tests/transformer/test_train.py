import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.reader import CheckpointReader
from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.token_file import TokenFileWriter
from scaling_slurm.core.optimizer.learning_rate import learning_rate
from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.core.trainer.preemption import StopListener
from scaling_slurm.errors import ConfigError, ExitCode
from scaling_slurm.run_directory import RunDirectory, read_json, read_lines
from scaling_slurm.settings import dump_yaml, fingerprint
from scaling_slurm.transformer import train as module
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import RunConfig
from scaling_slurm.transformer.model.model import build_layers
from scaling_slurm.transformer.train import check_supported, default_run, main, train, train_here
from tests.support.distributed import local_rendezvous, run_ranks
from tests.support.language_model import bound_model, small_config

SEQUENCE = 8
TOKENS = np.random.default_rng(0).integers(0, 61, 40 * SEQUENCE + 1)
"""40 windows: ten steps of eight are two epochs."""


@pytest.fixture(autouse=True)
def _as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "configure", lambda rank, level: None)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SCALING_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def run_config(folder: Path, *, model: dict[str, object] | None = None, **trainer: object) -> RunConfig:
    """Of a small run over TOKENS in `folder`."""
    with TokenFileWriter(folder / "train", np.uint16, overwrite=True) as writer:
        writer.add_document(TOKENS)
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": small_config(sequence_length=SEQUENCE, **(model or {})).model_dump(),
            "data": {"train": str(folder / "train")},
            "optimizer": {"learning_rate": 0.01, "minimum_learning_rate": 0.001, "warmup_steps": 3},
            "trainer": {"num_steps": 10, "global_batch_size": 8, "micro_batch_size": 2, "precision": "float64"}
            | trainer,
        }
    )


def losses(run: RunDirectory) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_lines(run.metrics_file) if record["kind"] == "training"}


def plain_losses(config: RunConfig) -> list[float]:
    """The same in plain PyTorch: whole batches, the mean loss, clip_grad_norm_, AdamW with two groups."""
    model = bound_model(config.model)
    order = TokenDataset(config.data.train, SEQUENCE, config.trainer.seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.epsilon,
    )
    found, num_clipped = [], 0
    for step in range(1, config.trainer.num_steps + 1):
        positions = np.arange((step - 1) * 8, step * 8)
        starts = order.windows(positions) * SEQUENCE
        tokens = torch.tensor(np.stack([TOKENS[start : start + SEQUENCE + 1] for start in starts]))
        logits = model(Inputs(tokens[:, :-1], torch.tensor(positions))).logits()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)
        num_clipped += int(norm > config.optimizer.gradient_clipping)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, config.trainer.num_steps)
        optimizer.step()
        found.append(loss.item())
    assert num_clipped > 0, "the case is meant to clip"
    return found


@pytest.mark.parametrize(("micro", "dropout"), [(8, 0.0), (2, 0.0), (2, 0.1)])
def test_alone_it_equals_a_plain_pytorch_loop(tmp_path: Path, micro: int, dropout: float) -> None:
    config = run_config(tmp_path, micro_batch_size=micro, model={"residual_dropout": dropout})
    run = RunDirectory(tmp_path / "run")
    train_here(config, run)
    assert list(losses(run).values()) == pytest.approx(plain_losses(config), rel=1e-9)
    assert read_json(run.finished_file)["step"] == 10
    assert run.config_file.read_text() == dump_yaml(config)


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    with CheckpointReader(checkpoint) as reader:
        found = {}
        for key, entries in reader.entries.items():
            kind, _, name = key.partition("/")
            found[key] = reader.read_box(kind, name, tuple((0, size) for size in entries[0].shape))  # type: ignore[arg-type]
        return found


def test_bfloat16_has_float32_masters_and_continues_bit_for_bit(tmp_path: Path) -> None:
    config = run_config(tmp_path, precision="bfloat16", num_steps=6, save_interval=3, model={"residual_dropout": 0.1})
    whole, cut = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "cut")
    train_here(config, whole)
    last, middle = CheckpointDirectory(whole.checkpoints).committed()
    assert (last.step, middle.step) == (6, 3)
    shutil.copytree(whole.path, cut.path)
    cut.finished_file.unlink()
    cut.metrics_file.unlink()
    shutil.rmtree(cut.checkpoints / last.name)
    train_here(config, cut)
    assert losses(cut) == {step: loss for step, loss in losses(whole).items() if step > 3}
    expected, got = tensors_of(last), tensors_of(CheckpointDirectory(cut.checkpoints).committed()[0])
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[key]) for key, tensor in expected.items())
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32}
    weight = expected["weight/head.weight"]
    assert (weight != weight.bfloat16().float()).double().mean() > 0.9, "the masters are not rounded"
    exact = RunDirectory(tmp_path / "exact")
    train_here(config.model_copy(update={"trainer": config.trainer.model_copy(update={"precision": "float32"})}), exact)
    assert losses(whole) == pytest.approx(losses(exact), rel=0.01)
    assert losses(whole) != losses(exact)


def train_ranks(topology: Topology, config: RunConfig, folder: Path) -> tuple[dict[str, Any], int]:
    """Initial weights of a run, and its last step."""
    model = ParallelModule(build_layers(config.model))
    model.bind(topology, seed=config.trainer.seed, dtype=torch.float64)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    size, rank = topology.layout.world_size, topology.rank
    with patch.object(Topology, "initialize", return_value=topology), StopListener() as listener:
        outcome = train(config, RunDirectory(folder), local_rendezvous(rank, size), listener)
    return weights, outcome.step


def test_weights_and_first_loss_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = run_config(tmp_path, num_steps=3, model={"residual_dropout": 0.1, "attention_dropout": 0.1})
    expected, _ = train_ranks(Topology(), config, tmp_path / "1")
    for size in (2, 4):
        for weights, step in run_ranks(size, partial(train_ranks, config=config, folder=tmp_path / str(size))):
            assert step == 3
            assert weights.keys() == expected.keys()
            assert all(np.array_equal(weights[name], expected[name]) for name in expected)
        alone, together = losses(RunDirectory(tmp_path / "1")), losses(RunDirectory(tmp_path / str(size)))
        assert together[1] == pytest.approx(alone[1], rel=1e-14)
        assert together == pytest.approx(alone, rel=1e-11)


def test_a_wrong_validation_path_fails_before_the_first_step(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    data = config.data.model_copy(update={"validation": tmp_path / "nowhere"})
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"there is no .*nowhere\.bin"):
        train_here(config.model_copy(update={"data": data}), run)
    assert not run.metrics_file.exists()


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_layout_that_cannot_be_trained_is_refused(tmp_path: Path, setting: str) -> None:
    config = run_config(tmp_path)
    check_supported(config)
    topology = config.topology.model_copy(update={setting: 2})
    with pytest.raises(ConfigError, match=f"{setting} 2 .*cannot be trained yet; this version trains with 1 and 1"):
        check_supported(config.model_copy(update={"topology": topology}))


def test_the_default_run_is_named_by_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path)
    name = f"small-{fingerprint(config)}"
    assert default_run(config).path == tmp_path / "runs" / name
    monkeypatch.setenv("SCALING_RUNS", str(tmp_path / "elsewhere"))
    assert default_run(config).path == tmp_path / "elsewhere" / name
    assert default_run(config, Path("given")).path == tmp_path / "given" / name
    assert default_run(run_config(tmp_path, seed=1)).path.name != name


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_main_without_a_config_shows_its_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith("usage: python -m scaling_slurm.transformer.train CONFIG")


def test_main_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == ExitCode.CONFIG
    (tmp_path / "small.yaml").write_text(dump_yaml(run_config(tmp_path)))
    assert main(["small.yaml", "trainer.global_batch_size=9"]) == ExitCode.CONFIG
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: there is no config 'nowhere'")
    assert second.startswith("error: global_batch_size 9 is not divisible by micro_batch_size 2 x data_parallel_size 1")


def test_main_trains_and_then_finds_its_run_finished(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(dump_yaml(run_config(tmp_path)))
    for _ in range(2):
        assert main(["small.yaml", "trainer.num_steps=3"]) == ExitCode.OK
    (path,) = (tmp_path / "runs").iterdir()
    run = RunDirectory(path)
    assert list(losses(run)) == [1, 2, 3]
    assert [attempt.number for attempt in run.list_attempts()] == [1]


@pytest.fixture
def _algorithms_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that monkeypatch puts it back
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.usefixtures("_algorithms_put_back")
def test_deterministic_pins_the_algorithms_but_not_over_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    train_here(run_config(tmp_path, num_steps=3, deterministic=True), RunDirectory(tmp_path / "run"))
    assert torch.are_deterministic_algorithms_enabled()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Tree")


def test_a_replaced_attempt_leaves_at_once_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    attempt = RunDirectory(tmp_path).claim_attempt()
    module.leave_to_newer_attempt(attempt, 2)
    assert codes == [ExitCode.REFUSED]
    assert "attempt 1 has been replaced by a newer one" in caplog.text
    assert [record["rank"] for record in attempt.failures()] == [2]
