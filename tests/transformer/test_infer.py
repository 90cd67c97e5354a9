import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
from scaling_slurm.errors import ConfigError, NotFoundError, RefusedError
from scaling_slurm.settings import load_settings
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import RunConfig
from scaling_slurm.transformer.infer import LanguageModel, find_checkpoint, load_model
from scaling_slurm.transformer.inference.sampling import SamplingConfig
from tests.support.checkpoints import flip_bit
from tests.support.language_model import bound_model, save_weights, write_run

TEXT = "Zürich grüßt 東京 — naïve 🦊🦊 foxes jump."


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small-1"
    write_run(path, TEXT)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt; a run may be moved as a whole."""
    return Path(shutil.copytree(trained, tmp_path / "moved"))


@pytest.fixture(scope="module")
def model(trained: Path) -> LanguageModel:
    return load_model(trained)


def newest(run: Path) -> Path:
    return CheckpointDirectory(run / "checkpoints").committed()[0].path


def test_continues_what_it_was_trained_on(model: LanguageModel) -> None:
    completion = model.complete("Zürich grüßt", max_tokens=100)
    pieces = list(completion)
    assert "".join(pieces) == TEXT.removeprefix("Zürich grüßt")
    assert completion.finish_reason == "stop"
    assert len(pieces) > 5, "it must come as a stream"
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_empty_prompt_begins_a_document(model: LanguageModel) -> None:
    assert "".join(model.complete("", max_tokens=100)) == TEXT
    seen = []
    engine = SimpleNamespace(generate=lambda prompt, **_: seen.append(prompt))
    words = SimpleNamespace(encode=lambda text: [], end_of_document_id=5)
    LanguageModel(engine, words, model.checkpoint).complete("", max_tokens=1)  # type: ignore[arg-type]
    assert seen == [[5]]


def test_stream_equals_decoding_everything_at_once(model: LanguageModel) -> None:
    """Hot sampling gives any bytes, also ones that are no characters, and an end within one."""
    for seed in range(8):
        sampling = SamplingConfig(temperature=5.0, seed=seed)
        tokens = list(model.engine.generate(model.tokenizer.encode("Zü"), max_tokens=20, sampling=sampling))
        end = model.tokenizer.end_of_document_id
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        completion = model.complete("Zü", max_tokens=20, sampling=sampling)
        assert "".join(completion) == model.tokenizer.decode(tokens)
        assert completion.num_tokens == len(tokens)


def test_loads_exactly_the_saved_weights(run: Path) -> None:
    config = load_settings(RunConfig, run / "config.yaml").value
    other = bound_model(config.model, torch.float32, seed=5)
    save_weights(run, config, other, step=20)
    loaded = load_model(run)
    assert loaded.checkpoint.step == 20
    for ours, theirs in zip(loaded.engine.model.parameter_infos(), other.parameter_infos(), strict=True):
        assert ours.name == theirs.name
        assert torch.equal(ours.parameter, theirs.parameter)
    inputs = Inputs(torch.tensor([[1, 2, 3]]), torch.zeros(1, dtype=torch.int64))
    assert torch.equal(loaded.engine.model(inputs).logits(), other.eval()(inputs).logits())


def test_needs_no_optimizer_state(run: Path) -> None:
    manifest = CheckpointDirectory(run / "checkpoints").committed()[0].manifest
    weights = {entry.file for entry in manifest.entries if entry.kind == "weight"}
    others = set(manifest.files) - weights
    assert others
    for name in others:
        (newest(run) / name).unlink()
    assert load_model(run).checkpoint.step == 7


def test_passes_over_a_damaged_checkpoint(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_settings(RunConfig, run / "config.yaml").value
    damaged = save_weights(run, config, bound_model(config.model, torch.float32), step=20)
    weights = next(entry.file for entry in damaged.manifest.entries if entry.kind == "weight")
    flip_bit(damaged.path / weights, 5000)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(run).step == 7
    assert damaged.name in caplog.text
    assert "digest" in caplog.text
    with pytest.raises(RefusedError, match="is whole"):
        find_checkpoint(damaged.path)


def test_takes_the_directory_of_a_checkpoint(run: Path) -> None:
    config = load_settings(RunConfig, run / "config.yaml").value
    save_weights(run, config, bound_model(config.model, torch.float32), step=20)
    assert find_checkpoint(run).step == 20
    checkpoints = run / "checkpoints"
    assert find_checkpoint(checkpoints / "step-00000007-attempt-001").step == 7
    for folder in (checkpoints, checkpoints / "latest"):
        assert find_checkpoint(folder).step == 20
    copies = checkpoints.rename(run.parent / "copies")
    assert find_checkpoint(copies).step == 20
    checkpoints.symlink_to(copies)
    assert find_checkpoint(checkpoints / "latest").step == 20


def test_a_checkpoint_that_is_not_there(run: Path) -> None:
    checkpoints = run / "checkpoints"
    with pytest.raises(NotFoundError, match=r"no such checkpoint: step-9; there are step-00000007-attempt-001; in /"):
        find_checkpoint(checkpoints / "step-9")
    (checkpoints / "step-00000007-attempt-001" / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match=r"step-00000007-attempt-001 was never completed; there are none; in /"):
        find_checkpoint(checkpoints / "step-00000007-attempt-001")


def test_a_run_may_be_called_latest(run: Path) -> None:
    (run.parent / "latest").symlink_to(run)
    assert find_checkpoint(run.parent / "latest").step == 7


@pytest.mark.parametrize(("precision", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_precision(trained: Path, precision: str | None, dtype: torch.dtype) -> None:
    loaded = load_model(trained, precision=precision)
    assert {parameter.dtype for parameter in loaded.engine.model.parameters()} == {dtype}
    assert "".join(loaded.complete("Zürich", max_tokens=100)) == TEXT.removeprefix("Zürich")


def test_a_run_without_a_checkpoint_says_what_to_do(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(NotFoundError, match=r"moved has no checkpoint yet; .*save_interval.*; `scaling status moved`"):
        load_model(run)


def test_neither_run_nor_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="neither a run nor a checkpoint"):
        load_model(tmp_path)


def test_wrong_options_are_user_errors(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device 'gpu7' cannot be used.*--device"):
        load_model(trained, device="gpu7")
    with pytest.raises(ConfigError, match=r"precision 'half'; one of float32.*--precision"):
        load_model(trained, precision="half")
    with pytest.raises(NotFoundError, match=r"no tokenizer .*none.json.*--tokenizer"):
        load_model(trained, tokenizer=tmp_path / "none.json")


def test_a_prompt_longer_than_the_context_is_refused(model: LanguageModel) -> None:
    longest = model.engine.config.sequence_length
    with pytest.raises(ConfigError, match=f"tokens; the model reads at most {longest}"):
        model.complete("Zürich " * 100, max_tokens=1)


def test_a_foreign_tokenizer_is_refused(run: Path) -> None:
    path = run / "data" / "tokenizer.json"
    record = json.loads(path.read_text())
    record["model"]["vocab"]["new"] = 5000
    path.write_text(json.dumps(record))
    # The run remembers where its data were, so the copy must be named.
    with pytest.raises(ConfigError, match="has 5001 ids, the model"):
        load_model(run, tokenizer=path)


def test_settings_of_another_version_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = find_checkpoint(run)
    settings = checkpoint.manifest.config
    settings["model"]["num_experts"] = 8
    monkeypatch.setattr("scaling_slurm.transformer.infer.find_checkpoint", lambda path: checkpoint)
    with pytest.raises(ConfigError, match=r"model.num_experts"):
        load_model(run)
