"""The command: what it prints, its threads and signals."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from scaling_slurm.cli.prepare import prepare
from scaling_slurm.errors import ConfigError, ExitCode
from scaling_slurm.transformer.text.documents import Corpus

app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return tmp_path / "in"


def scaling_prepare(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_prints_figures_and_the_lines_of_a_run_file(folder: Path, tmp_path: Path) -> None:
    (folder / "latin.py").write_bytes(b"\xe4")
    out = tmp_path / "out"
    result = scaling_prepare(folder, "--out", out, "--train-tokenizer", 300, "--suffix", ".py", "--validation", 0.1)
    assert result.exit_code == 0, result.output
    assert re.search(r"out: 40 documents, [\d,]+ tokens of \d\.\d\d bytes in [\d.]+ s, [\d,]+ tokens/s", result.output)
    assert "left out: 1 file that is not UTF-8\n" in result.output
    assert "asked for" not in result.output
    assert "relative to" not in result.output  # out is absolute
    assert "\r" not in result.output  # progress only on a terminal
    lines = yaml.safe_load(result.output.split("For the run file:")[1])
    assert lines == {
        "data": {"train": str(out / "train"), "validation": str(out / "validation")},
        "model": {"vocab_size": 300},
    }


def test_fewer_ids_than_asked_for_and_relative_paths_are_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "empty.py").write_text("")
    result = scaling_prepare(folder, "--out", "out", "--train-tokenizer", 100_000)
    snippet = yaml.safe_load(result.output.split("For the run file:")[1])
    assert f"asked for 100,000 ids, the corpus yields {snippet['model']['vocab_size']:,}\n" in result.output
    assert "left out: 1 empty document\n" in result.output
    assert "data:  # relative to the directory where scaling is called\n" in result.output
    assert snippet["data"]["train"] == "out/train"


def test_one_document_has_no_validation_set(folder: Path, tmp_path: Path) -> None:
    result = scaling_prepare(folder / "1.py", "--out", tmp_path / "out", "--train-tokenizer", 260)
    assert "no validation set: one document cannot be split" in result.output
    assert "validation:" not in result.output


def test_errors_end_with_code_two(folder: Path, tmp_path: Path) -> None:
    for arguments in (
        (folder, "--out", tmp_path / "out"),
        (tmp_path / "absent", "--out", tmp_path / "out", "--train-tokenizer", 300),
        (folder, "--out", tmp_path, "--train-tokenizer", 300),
        (folder, "--out", tmp_path / "out", "--train-tokenizer", 300, "--exclude", "*.py"),
    ):
        result = scaling_prepare(*arguments)
        assert isinstance(result.exception, ConfigError)
        assert result.exception.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "out").exists()


def test_any_number_of_workers_gives_the_same_bytes_and_no_torch_is_loaded(folder: Path, tmp_path: Path) -> None:
    for workers in ("1", "3"):
        code = (
            "import sys, typer; from scaling_slurm.cli.prepare import prepare;"
            "app = typer.Typer(); app.command()(prepare); app(standalone_mode=False); assert 'torch' not in sys.modules"
        )
        arguments = [folder, "--out", tmp_path / workers, "--train-tokenizer", "300", "--workers", workers]
        subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True)
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) == 6
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name


def test_sigterm_cleans_up(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts_until_a_signal(corpus: Corpus) -> Iterator[str]:
        yield "some text"
        os.kill(os.getpid(), signal.SIGTERM)
        yield "more"

    monkeypatch.setattr(Corpus, "texts", texts_until_a_signal)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        prepare([folder], tmp_path / "out", train_tokenizer=300)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "out").exists()
