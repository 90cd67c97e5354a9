"""Every test of the stand-in works in a directory of its own; some run against real Slurm too."""

from pathlib import Path

import pytest

from tests.support.slurm import use_environment


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["local", pytest.param("real", marks=pytest.mark.slurm)])
def any_slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once the stand-in and once, where it is installed, real Slurm: so that the one says what the other says."""
    if request.param == "local":
        request.getfixturevalue("local_scheduler")
    else:
        use_environment(monkeypatch, request.getfixturevalue("slurm_lab").environment)
    return str(request.param)
