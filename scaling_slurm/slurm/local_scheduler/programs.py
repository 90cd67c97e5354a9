"""Puts the stand-in's programs where they can go first on PATH. The only part that the rest of the package calls."""

import hashlib
import os
import shlex
import sys
from pathlib import Path

from scaling_slurm.slurm.local_scheduler.jobs import state_directory

PROGRAMS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sacct")


def install_programs() -> Path:
    """The directory with sbatch, srun, scontrol, squeue, scancel and sacct for this Python and this checkout.

    They are written on demand, since a wheel can keep neither their mode reliably nor the path of the interpreter.
    Several environments share one state directory: each has programs of its own, and all see the same jobs.
    """
    main = Path(__file__).with_name("__main__.py").resolve()
    key = hashlib.sha256(f"{sys.executable}\0{main}".encode()).hexdigest()[:12]
    directory = Path(state_directory(), "bin", key)
    directory.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        # Isolated and without site packages: a call takes some 30 ms instead of several hundred.
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(main))} {name} "$@"\n'
        program = directory / name
        if program.exists() and program.read_text() == text and os.access(program, os.X_OK):
            continue
        temporary = directory / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(program)
    return directory
