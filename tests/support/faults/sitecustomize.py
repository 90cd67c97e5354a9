"""Faults on order, for whole jobs under test: put this folder on PYTHONPATH and set SCALING_TEST_FAULT.

    "slow=0.2"             every step of every rank takes that much longer
    "raise=5 rank=1"       rank 1 raises in step 5
    "stall=5 rank=1"       the data of rank 1 never come in step 5
    "compile=20 rank=0"    rank 0 spends 20 s in its first step, as with a compiler
    "import=5"             torch takes 5 s longer to import
    "start=5"              the interpreter takes 5 s longer to start, as on a busy file system
    "end=5"                the record of the attempt's end takes 5 s to be durable
Only the first attempt is harmed, but "slow" goes on.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

FAULTS = dict(part.split("=") for part in os.environ.get("SCALING_TEST_FAULT", "").split())
FIRST = os.environ.get("SCALING_ATTEMPT", "1") == "1"
HERE = os.environ.get("SLURM_PROCID", "0") == FAULTS.get("rank", os.environ.get("SLURM_PROCID", "0"))


def harm_loader(module) -> None:
    original, steps = module.DataLoader.next_step, [0]

    def next_step(self, timeout):
        if FIRST and HERE and "stall" in FAULTS and steps[0] + 1 == int(FAULTS["stall"]):
            time.sleep(timeout)
            raise module.DataTimeoutError("stalled on order")
        batches = original(self, timeout)
        steps[0] += 1
        time.sleep(float(FAULTS.get("slow", 0)))
        if FIRST and HERE and "compile" in FAULTS and steps[0] == 1:
            time.sleep(float(FAULTS["compile"]))
        if FIRST and HERE and steps[0] == int(FAULTS.get("raise", -1)):
            raise ValueError("this sample is broken")
        return batches

    module.DataLoader.next_step = next_step


def harm_records(module) -> None:
    original = module.write_atomically

    def write_atomically(path, text):
        original(path, text)
        if FIRST and path.name == "end.json":
            time.sleep(float(FAULTS["end"]))

    module.write_atomically = write_atomically


HARMED = {"scaling_slurm.core.data.loader": harm_loader}
if "end" in FAULTS:
    HARMED["scaling_slurm.run_directory"] = harm_records


class AfterImport(importlib.abc.MetaPathFinder):
    """Harms a module right after its import."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch" and FIRST and "import" in FAULTS:
            time.sleep(float(FAULTS.pop("import")))
        harm = HARMED.pop(name, None)
        if harm is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            harm(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    if FIRST and "SLURM_PROCID" in os.environ and "submitit" in " ".join(sys.orig_argv):
        time.sleep(float(FAULTS.get("start", 0)))
    sys.meta_path.insert(0, AfterImport())
