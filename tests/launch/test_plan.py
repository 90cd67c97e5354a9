"""Plans: identity of a run, arithmetic, and the text for people."""

import sys
from pathlib import Path

import pytest
from submitit import SlurmExecutor

from scaling_slurm.errors import ConfigError
from scaling_slurm.launch.plan import describe, plan
from scaling_slurm.resources import find
from scaling_slurm.settings import fingerprint, load_settings
from scaling_slurm.slurm.cluster import load_cluster
from scaling_slurm.transformer.config import RunConfig
from tests.support.plans import load_run, plan_in, write_cluster


def test_a_sound_plan_has_no_problems_and_writes_nothing(tmp_path: Path) -> None:
    load_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    job = plan_in(tmp_path)
    assert (job.problems, job.obstacles) == ((), ())
    assert sorted(tmp_path.rglob("*")) == before
    assert job.run_directory.parent == tmp_path / "runs"


# Identity


def test_the_run_id_is_name_settings_and_the_next_free_number(tmp_path: Path) -> None:
    job = plan_in(tmp_path)
    prefix = f"small-{fingerprint(job.config)}-"
    assert job.run_id == f"{prefix}1"
    for name in (f"{prefix}1", f"{prefix}9", f"{prefix}x", "small-00000000-77"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert plan_in(tmp_path).run_id == f"{prefix}10"
    other = plan_in(tmp_path, None, "trainer.seed=1").run_id
    assert other.endswith("-1")
    assert not other.startswith(prefix)


def test_an_existing_run_keeps_its_id(tmp_path: Path) -> None:
    assert plan_in(tmp_path, run_id="old").run_directory == tmp_path / "runs" / "old"


def test_the_same_wish_gives_the_same_script(tmp_path: Path) -> None:
    assert plan_in(tmp_path).script == plan_in(tmp_path).script


def test_data_paths_do_not_depend_on_where_the_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = plan_in(tmp_path, None, "data.train=data/train", "data.tokenizer=t.json")
    assert job.config.data.train == tmp_path / "data/train"
    assert job.config.data.tokenizer == tmp_path / "t.json"


# Arithmetic


def test_layout_batch_and_cost(tmp_path: Path) -> None:
    job = plan_in(tmp_path, write_cluster(tmp_path, gpu={"per_node": 4}), "allocation.time='90'")
    assert (job.layout.world_size, job.layout.data) == (4, 4)
    assert (job.batch.micro_batch_size, job.batch.accumulation) == (1, 4)
    assert job.tokens_per_step == 16 * 8
    assert job.node_hours == 3.0
    assert job.gpu_hours == 12.0


def test_a_batch_that_cannot_be_cut_is_refused_with_all_factors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size 15 .* data_parallel_size 4"):
        plan_in(tmp_path, None, "trainer.global_batch_size=15")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 .* world size 4"):
        plan_in(tmp_path, None, "topology.tensor_parallel_size=3")


def test_the_command_is_the_one_that_submitit_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / "a b (#1=2)"
    job = plan_in(folder)
    theirs = SlurmExecutor(job.run_directory / "submitit")._submitit_command_str
    assert job.command == theirs
    assert f" -- {theirs} || rc=$?" in job.script
    assert job.python == (sys.executable,)


def test_python_may_be_a_command_of_several_words(tmp_path: Path) -> None:
    job = plan_in(tmp_path, write_cluster(tmp_path, python="apptainer exec '/my image.sif' python"))
    assert job.python == ("apptainer", "exec", "/my image.sif", "python")
    assert job.command.startswith("apptainer exec '/my image.sif' python -u -m submitit.core._submit ")


# For people


def test_the_description_names_every_number(tmp_path: Path) -> None:
    text = describe(plan_in(tmp_path))
    for part in (
        "4 ranks = 4 data x 1 pipeline x 1 tensor",
        "16 sequences = 1 micro x 4 accumulated x 4 data; 128 tokens a step",
        "10 steps, 1,280 tokens",
        "2.0 node-hours",
        "2 nodes x 2 ranks; limit 0-01:00:00",
    ):
        assert part in text


def test_the_large_example_can_be_planned_for_a_real_machine(tmp_path: Path) -> None:
    run = load_settings(RunConfig, find("configs", "7b"))
    job = plan(run, load_cluster("booster"), runs_root=tmp_path, account="project", environ={})
    assert job.parameters.total == 6_738_415_616
    assert (job.layout.tensor, job.layout.data, job.batch.accumulation) == (4, 16, 64)
    assert job.memory.total < 1.2 * 40 * 2**30
    assert "#SBATCH --account=project\n#SBATCH --partition=booster\n#SBATCH --nodes=16\n" in job.script
    assert "384.0 node-hours" in describe(job)
    assert job.problems == ()
    allowed = ("tensor and pipeline size 1", "not found", "free, and two checkpoints")
    assert all(any(part in str(obstacle) for part in allowed) for obstacle in job.obstacles)
