"""Workplaces for whole runs: prepared data once, a directory of its own for each test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Run, Workplace, make_corpus, scrubbed
from tests.support.slurm import end_local_jobs
from tests.support.slurm_lab import SlurmLab

LAB_PROFILE = ROOT / "tests" / "data" / "clusters" / "lab.yaml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.end_to_end)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files and tokenizer of a small real text."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "scaling_slurm", "prepare", make_corpus(folder), "--out", folder / "tokens"]
    options = ["--train-tokenizer", "512", "--validation", "0.3"]
    subprocess.run([*map(str, command), *options], check=True, capture_output=True, text=True, timeout=120)
    return folder / "tokens"


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def local(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Jobs run by the local scheduler, with state and registry of their own."""
    for name in set(os.environ) - set(scrubbed(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SCALING_LOCAL_STATE", str(tmp_path / "scheduler"))
    monkeypatch.setenv("SCALING_HOME", str(tmp_path / "home"))
    yield Workplace(tmp_path, data, "local", environment())
    end_local_jobs()


@pytest.fixture(scope="module")
def on_lab(tmp_path_factory: pytest.TempPathFactory, data: Path, slurm_lab: SlurmLab) -> Workplace:
    """Jobs run by the real Slurm of several nodes."""
    path = tmp_path_factory.mktemp("lab")
    keep = {name: value for name, value in slurm_lab.environment.items() if os.environ.get(name) != value}
    return Workplace(path, data, str(LAB_PROFILE), keep | environment() | {"SCALING_HOME": str(path / "home")})


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    """A run of 2 nodes x 2 ranks that nothing disturbs: what every other run must equal to the last bit."""
    path = tmp_path_factory.mktemp("whole")
    patch = pytest.MonkeyPatch()
    state = {"SCALING_LOCAL_STATE": str(path / "scheduler"), "SCALING_HOME": str(path / "home")}
    for name, value in state.items():
        patch.setenv(name, value)
    workplace = Workplace(path, data, "local", environment() | state)
    run = workplace.submit(workplace.config())
    run.wait_until_finished()
    run.wait_for_end()
    end_local_jobs()
    patch.undo()
    return run
