"""The README is true: its tree, its exit codes, and its commands, which are run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaling_slurm.errors import ExitCode
from tests.support.runs import ROOT, make_corpus, scrubbed
from tests.support.slurm import end_local_jobs
from tests.support.tree import replaced

README = (ROOT / "README.md").read_text()


def test_the_tree_is_that_of_the_package():
    assert replaced(README) == README, "run python tests/support/tree.py"


def test_every_exit_code_is_documented():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a reader has in front of him: the shipped files, a corpus, and the commands on PATH."""
    for name in set(os.environ) - set(scrubbed(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SCALING_LOCAL_STATE", str(tmp_path / "scheduler"))
    monkeypatch.setenv("SCALING_HOME", str(tmp_path / "home"))
    for folder in ("configs", "clusters", "templates"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    make_corpus(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {"scaling": "-m scaling_slurm", "torchrun": "-m torch.distributed.run", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    end_local_jobs()


@pytest.mark.end_to_end
def test_every_command_runs(workplace: Path):
    listed = commands()
    assert len(listed) >= 12
    # A small corpus yields a small vocabulary, which is all that differs from the reader's case.
    script = "set -ex\n" + "\n".join(listed).replace("--train-tokenizer 4096", "--train-tokenizer 1024")
    done = subprocess.run(["bash", "-c", script], cwd=workplace, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert "finished after step 80" in done.stdout
    assert "#SBATCH --account=PROJECT" in done.stdout


@pytest.mark.end_to_end
def test_quickstart_runs_and_the_loss_falls(workplace: Path):
    copy = workplace / "copy"
    (copy / "examples").mkdir(parents=True)
    quickstart = (ROOT / "examples" / "quickstart.sh").read_text()
    (copy / "examples" / "quickstart.sh").write_text(quickstart)
    for folder in ("clusters", "templates"):
        (copy / folder).symlink_to(ROOT / folder)
    (copy / "configs").mkdir()
    tiny = (ROOT / "configs" / "tiny.yaml").read_text()
    # The same, shorter: the whole length is for people who watch.
    (copy / "configs" / "tiny.yaml").write_text(tiny.replace("num_steps: 500", "num_steps: 140"))
    done = subprocess.run(
        ["bash", "examples/quickstart.sh"], cwd=copy, capture_output=True, text=True, timeout=400
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = re.search(r"Loss before (\d+\.\d+), after (\d+\.\d+)", done.stdout).groups()
    assert float(after) < float(before) - 1.5
    assert "$ scaling resume tiny-" in done.stdout
    assert "$ scaling infer tiny-" in done.stdout
    assert "'def main('" in done.stdout
