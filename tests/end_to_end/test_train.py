"""`scaling train` without a scheduler: alone, under torchrun, as a module; killed and continued."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scaling_slurm.run_directory import RunDirectory, read_lines
from tests.support.runs import FAULTS, ROOT, Run, Workplace


def losses(path: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_lines(RunDirectory(path).metrics_file) if r["kind"] == "training"}


def the_run(local: Workplace) -> Path:
    (path,) = (local.path / "runs").iterdir()
    return path


def test_alone_it_equals_four_ranks_to_summation_order(local: Workplace, uninterrupted: Run):
    local.scaling("train", local.config())
    path = the_run(local)
    expected = uninterrupted.losses()
    got = losses(path)
    assert list(got) == list(expected)
    assert all(abs(got[step] - expected[step]) < 1e-4 for step in expected)
    assert abs(got[1] - expected[1]) < 1e-6, "the same initial weights and the same samples"
    again = local.scaling("train", "tiny.yaml")
    assert "is finished" in again.stderr


def test_a_signal_saves_and_the_same_command_continues(local: Workplace):
    local.config()
    command = [sys.executable, "-m", "scaling_slurm.transformer.train", "tiny.yaml"]
    environment = os.environ | local.environment | {"SCALING_TEST_FAULT": "slow=0.05"}
    environment["PYTHONPATH"] = f"{FAULTS}{os.pathsep}{ROOT}"
    with subprocess.Popen(command, cwd=local.path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "step 15/40" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "stopped (preempted) after step" in rest
    assert 15 <= max(losses(the_run(local))) < 20
    local.scaling("train", "tiny.yaml")
    whole = local.scaling("train", "tiny.yaml", "--run", local.path / "whole")
    assert "finished after step 40" in whole.stderr
    assert losses(the_run(local)) == losses(local.path / "whole")


def test_killed_at_any_time_it_continues_bit_for_bit(local: Workplace):
    local.config()
    local.scaling("train", "tiny.yaml", "--run", local.path / "whole")
    command = [sys.executable, "-m", "scaling_slurm", "train", "tiny.yaml", "--run", "killed"]
    environment = os.environ | local.environment
    for pause in (0.3, 0.7, 1.1):
        with subprocess.Popen(command, cwd=local.path, env=environment, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if "training" in line:
                    time.sleep(pause)
                    process.kill()
                    break
    local.scaling("train", "tiny.yaml", "--run", "killed")
    assert losses(local.path / "killed") == losses(local.path / "whole")


def test_under_torchrun(local: Workplace, uninterrupted: Run):
    local.config()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "29713"]
    module = ["-m", "scaling_slurm.transformer.train", "tiny.yaml"]
    environment = os.environ | local.environment
    done = subprocess.run(
        [*command, *module], cwd=local.path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert losses(the_run(local)) == uninterrupted.losses(), "the same layout gives the same bits"


def test_two_at_once_on_one_run_are_refused(local: Workplace):
    local.config()
    command = [sys.executable, "-m", "scaling_slurm", "train", "tiny.yaml"]
    environment = os.environ | local.environment | {"SCALING_TEST_FAULT": "slow=0.2"}
    environment["PYTHONPATH"] = f"{FAULTS}{os.pathsep}{ROOT}"
    with subprocess.Popen(command, cwd=local.path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert any("training" in line for line in process.stderr)
        refused = local.scaling("train", "tiny.yaml", code=8)
        process.kill()
    assert "another process is at work to train" in refused.stderr
