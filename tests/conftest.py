"""Fixtures that tests of several parts share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import end_local_jobs, start_lab, use_environment, use_local_scheduler
from tests.support.slurm_lab import SlurmLab


@pytest.fixture(scope="session")
def slurm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A real Slurm of four nodes, started when the first test asks for it; `lab.environment` leads to it."""
    yield from start_lab(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def on_slurm(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    """The same, with this process's own variables leading to it during the test."""
    use_environment(monkeypatch, slurm_lab.environment)
    return slurm_lab


@pytest.fixture
def local_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in for Slurm first on PATH, with jobs of its own and a minute of four seconds: its programs."""
    yield use_local_scheduler(monkeypatch, tmp_path / "local-scheduler", minute_seconds=4.0)
    end_local_jobs()


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder, registry and working directory for one test, and no variable that names other runs."""
    for name in ("SCALING_RUNS", "SCALING_CLUSTER", "SCALING_ACCOUNT", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCALING_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
