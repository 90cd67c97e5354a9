"""What a plan refuses, and what it only notes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaling_slurm.errors import ConfigError
from scaling_slurm.launch.plan import plan
from scaling_slurm.settings import load_settings
from scaling_slurm.transformer.config import RunConfig
from tests.support.plans import load_run, plan_in, write_cluster


def messages(folder: Path, *overrides: str, **options: object) -> list[str]:
    return [str(problem) for problem in plan_in(folder, None, *overrides, **options).problems]


def obstacles(folder: Path, *overrides: str, **options: object) -> list[str]:
    """What is not ready here. A plan can be made all the same."""
    job = plan_in(folder, None, *overrides, **options)
    assert job.problems == ()
    return [str(obstacle) for obstacle in job.obstacles]


def test_missing_data_is_told_with_the_line_that_names_it(tmp_path: Path) -> None:
    [obstacle] = obstacles(tmp_path, f"data.validation={tmp_path}/none")
    assert f"{tmp_path}/none.bin and {tmp_path}/none.idx not found" in obstacle
    assert "data.validation in command line" in obstacle
    load_run(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(path.read_text().replace("data/train", "data/other"))
    job = plan(load_settings(RunConfig, path), write_cluster(tmp_path), runs_root=tmp_path)
    assert any(f"{path}:" in str(obstacle) for obstacle in job.obstacles)


def test_a_token_file_with_one_half_missing(tmp_path: Path) -> None:
    (tmp_path / "v.bin").touch()
    [obstacle] = obstacles(tmp_path, f"data.validation={tmp_path}/v")
    assert "v.idx not found" in obstacle
    assert "v.bin" not in obstacle


@pytest.mark.parametrize(("largest", "refused"), [(63, False), (64, True)])
def test_token_ids_that_the_embedding_does_not_have(largest: int, refused: bool, tmp_path: Path) -> None:
    load_run(tmp_path)
    record = {"files": {"train": {"tokens": 5, "largest_token_id": largest}}}
    (tmp_path / "data" / "data.json").write_text(json.dumps(record))
    found = messages(tmp_path)
    assert bool(found) is refused
    if refused:
        assert "holds token id 64, but vocab_size is 64; vocab_size must be at least 65" in found[0]


@pytest.mark.parametrize("text", ["{}", "[]", '{"files": []}', '{"files": {"train": 3}}', "{"])
def test_a_record_that_says_nothing_is_tolerated(text: str, tmp_path: Path) -> None:
    load_run(tmp_path)
    (tmp_path / "data" / "data.json").write_text(text)
    assert messages(tmp_path) == []


def test_token_files_that_are_damaged_or_too_short(tmp_path: Path) -> None:
    load_run(tmp_path)
    (tmp_path / "data" / "cut.idx").write_bytes((tmp_path / "data" / "train.idx").read_bytes())
    (tmp_path / "data" / "cut.bin").write_bytes((tmp_path / "data" / "train.bin").read_bytes()[:-2])
    [obstacle] = obstacles(tmp_path, f"data.train={tmp_path}/data/cut")
    assert f"cut.bin has 126 bytes, but {tmp_path}/data/cut.idx describes 128" in obstacle
    assert "data.train in command line" in obstacle
    [obstacle] = obstacles(tmp_path, "model.sequence_length=64")
    assert "has 64 tokens, fewer than one window of 65" in obstacle


def test_a_tokenizer_is_needed_where_it_is_named(tmp_path: Path) -> None:
    [obstacle] = obstacles(tmp_path, f"data.tokenizer={tmp_path}/t.json")
    assert "t.json not found" in obstacle
    assert any("tokenizer.json not found" in note for note in plan_in(tmp_path).notes)
    (tmp_path / "data" / "tokenizer.json").touch()
    assert not any("tokenizer.json not found" in note for note in plan_in(tmp_path).notes)


def test_this_version_plans_but_does_not_send_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    [obstacle] = obstacles(tmp_path, "topology.tensor_parallel_size=2")
    assert "this version trains with tensor and pipeline size 1 only" in obstacle
    assert "srun" in plan_in(tmp_path, None, "topology.tensor_parallel_size=2").script
    found = messages(tmp_path, "topology.pipeline_parallel_size=4")
    assert any("pipeline_parallel_size 4 is above num_layers 2" in problem for problem in found)


def test_heads_must_divide_by_the_tensor_size(tmp_path: Path) -> None:
    found = messages(tmp_path, "topology.tensor_parallel_size=4", "model.num_key_value_heads=2", "model.vocab_size=66")
    assert any("num_key_value_heads 2 is not divisible by tensor_parallel_size 4" in problem for problem in found)
    assert any("vocab_size 66 is not divisible" in problem for problem in found)
    assert not any("num_attention_heads" in problem for problem in found)


def test_memory_is_a_note_when_tight_and_a_problem_when_hopeless(tmp_path: Path) -> None:
    needed = plan_in(tmp_path).memory.total / 2**30
    for share, refused, noted in ((0.85, False, False), (0.95, False, True), (1.1, False, True), (1.25, True, False)):
        gpu = {"per_node": 2, "memory_gib": needed / share, "model": "H200"}
        job = plan_in(tmp_path, write_cluster(tmp_path, gpu=gpu))
        assert any("the run needs about" in str(problem) for problem in job.problems) is refused
        assert any("memory is tight" in note for note in job.notes) is noted


@pytest.mark.parametrize("name", ["50%", "it's", 'a"b', "back\\slash", "a\nb"])
def test_run_directories_that_slurm_or_submitit_misread_are_refused(name: str, tmp_path: Path) -> None:
    if "\n" in name:
        with pytest.raises(ConfigError, match="control character"):
            plan_in(tmp_path, runs_root=tmp_path / name)
    else:
        [problem] = messages(tmp_path, runs_root=tmp_path / name)
        assert "Slurm and submitit give these characters a meaning" in problem
        assert "--runs" in problem


@pytest.mark.parametrize("name", ["a b", "(x)", "k=v", "#1", "é"])
def test_other_strange_run_directories_are_taken(name: str, tmp_path: Path) -> None:
    assert messages(tmp_path, runs_root=tmp_path / name) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "/x"])
def test_a_runs_name_is_no_path(name: str, tmp_path: Path) -> None:
    assert any("a run's name is no path" in problem for problem in messages(tmp_path, run_id=name))


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [obstacle] = obstacles(tmp_path, runs_root=tmp_path / "file" / "runs")
    assert f"{tmp_path / 'file'} cannot be written to" in obstacle


@pytest.mark.parametrize(
    ("bytes_free", "inodes", "expected"),
    [(10**12, 10**6, None), (1000, 10**6, "two checkpoints need"), (10**12, 500, "room for 500 files")],
)
def test_room_for_two_checkpoints(
    bytes_free: int, inodes: int, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(f_bavail=bytes_free, f_frsize=1, f_files=10**9, f_favail=inodes)
    monkeypatch.setattr("os.statvfs", lambda path: usage)
    found = obstacles(tmp_path)
    assert len(found) == (expected is not None)
    if expected:
        assert expected in found[0]


def test_the_sites_limits_are_checked(tmp_path: Path) -> None:
    [problem] = messages(tmp_path, "allocation.time='5:00:00'")
    assert "over the limit 0-04:00:00 of partition normal" in problem
    assert "2 jobs" in problem
    assert "did you mean short?" in messages(tmp_path, partition="shrot")[0]
