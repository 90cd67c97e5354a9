"""The Slurm that the tests start: it is real, has several nodes, preempts and loses nodes."""

import os
from pathlib import Path

import pytest

from scaling_slurm.slurm.commands import Slurm
from tests.support.slurm import lift_hold, wait_for_job, wait_until
from tests.support.slurm_lab import SlurmLab

pytestmark = pytest.mark.slurm


def sbatch(lab: SlurmLab, script: Path, *options: str) -> str:
    return lab.run("sbatch", "--parsable", *options, str(script)).strip()


def test_step_on_two_nodes(slurm_lab: SlurmLab) -> None:
    said = slurm_lab.run("srun", "-N2", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    first, second = slurm_lab.nodes[:2]
    assert sorted(said.splitlines()) == [f"0 {first}", f"1 {first}", f"2 {second}", f"3 {second}"]


def test_variables_do_not_leak_into_this_process(slurm_lab: SlurmLab) -> None:
    assert os.environ.get("SLURM_CONF") != str(slurm_lab.configuration)


def test_preempted_job_is_queued_again_under_its_id(on_slurm: SlurmLab, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = tmp_path / "victim"
    script.write_text(f"""#!/bin/bash
#SBATCH --nodes=4 --exclusive --partition=low --requeue --open-mode=append --output={log}
echo restart ${{SLURM_RESTART_COUNT:-0}}
srun --ntasks-per-node=1 bash -c 'trap "echo TERM; exit 0" TERM; for i in {{1..300}}; do sleep 0.1; done'
sleep 30
""")
    urgent = tmp_path / "urgent"
    urgent.write_text("#!/bin/sh\n#SBATCH --nodes=4 --exclusive --partition=normal --output=/dev/null\n")
    slurm = Slurm()
    victim = sbatch(on_slurm, script)
    wait_until(lambda: log.exists() and "restart 0" in log.read_text(), "the victim to start")
    other = sbatch(on_slurm, urgent)
    waiting = wait_for_job(slurm, victim, "PENDING")
    assert waiting.job_id == victim
    wait_for_job(slurm, other, "COMPLETED")
    lift_hold(slurm, victim)
    wait_until(lambda: "restart 1" in log.read_text(), "the victim to start again")
    slurm.cancel(victim)
    assert wait_for_job(slurm, victim).restarts == 1
    # Slurm warns the tasks of the step when it preempts, not the job script.
    assert log.read_text().count("TERM") >= 4


def test_node_that_lost_its_power(on_slurm: SlurmLab, tmp_path: Path) -> None:
    lost = on_slurm.nodes[-1]
    script = tmp_path / "job"
    script.write_text(f"#!/bin/sh\n#SBATCH --nodelist={lost} --no-requeue --output={tmp_path}/log\nsleep 60\n")
    job_id = sbatch(on_slurm, script)
    wait_for_job(Slurm(), job_id, "RUNNING")
    on_slurm.power_off(lost)
    try:
        assert wait_for_job(Slurm(), job_id).state == "NODE_FAIL"
    finally:
        on_slurm.boot(lost)
    assert on_slurm.run("srun", f"--nodelist={lost}", "hostname").strip() in (lost, os.uname().nodename)
