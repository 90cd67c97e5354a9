"""The stand-in's programs: installed on demand, quick to start, and independent of the caller's Python settings."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaling_slurm.slurm.local_scheduler import __main__ as entry
from scaling_slurm.slurm.local_scheduler.programs import PROGRAMS, install_programs


def test_programs_are_written_once_and_repaired(local_scheduler: Path) -> None:
    assert sorted(path.name for path in local_scheduler.iterdir()) == sorted(PROGRAMS)
    assert all(os.access(path, os.X_OK) for path in local_scheduler.iterdir())
    before = (local_scheduler / "srun").stat().st_mtime_ns
    (local_scheduler / "sbatch").write_text("broken")
    assert install_programs() == local_scheduler
    assert (local_scheduler / "srun").stat().st_mtime_ns == before
    assert "local_scheduler" in (local_scheduler / "sbatch").read_text()


def test_each_python_has_programs_of_its_own(local_scheduler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    other = install_programs()
    assert other != local_scheduler
    assert "'/opt/my python/bin/python'" in (other / "sbatch").read_text()


def test_a_broken_environment_does_not_reach_them(local_scheduler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = local_scheduler.parent / "shadow"
    shadow.mkdir()
    (shadow / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.setenv("PYTHONPATH", str(shadow))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    subprocess.run(["squeue"], check=True, capture_output=True)


def test_queries_load_no_site_packages(local_scheduler: Path) -> None:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(["squeue"], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.5
    code = f"import runpy, sys; sys.argv = ['x', 'squeue']; runpy.run_path({entry.__file__!r}, run_name='__main__')"
    probe = f"import atexit, sys; atexit.register(lambda: print('pydantic' in sys.modules)); {code}"
    assert subprocess.check_output([sys.executable, "-I", "-S", "-c", probe], text=True).splitlines()[-1] == "False"
