import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
from scaling_slurm.core.checkpoint.manifest import parse, serialise
from tests.support.checkpoints import files_of, flip_bit, save


def names(directory: CheckpointDirectory) -> list[str]:
    return [checkpoint.name for checkpoint in directory.committed()]


def test_no_torch_is_imported() -> None:
    code = "import sys, scaling_slurm.core.checkpoint.directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checkpoints_are_sorted_as_numbers(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step, attempt in [(9, 1), (10, 1), (123456789, 1), (99999999, 2), (10, 3), (10, 12), (10, 1000)]:
        save(tmp_path, step, attempt=attempt)
    assert [(one.step, one.attempt) for one in directory.candidates()] == [
        (123456789, 1), (99999999, 2), (10, 1000), (10, 12), (10, 3), (10, 1), (9, 1),
    ]  # fmt: skip
    assert names(directory)[:2] == ["step-123456789-attempt-001", "step-99999999-attempt-002"]


def test_foreign_things_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ["step-9-attempt-1", "step-000000099-attempt-001", "step-00000099-attempt-001.bak", "old", "step-xyz"]:
        shutil.copytree(tmp_path / "step-00000001-attempt-001", tmp_path / name)
    (tmp_path / "step-00000098-attempt-001").write_text("a file")
    (tmp_path / ".nfs0001").touch()
    directory = CheckpointDirectory(tmp_path)
    assert names(directory) == ["step-00000001-attempt-001"]
    assert directory.remove_stale_temporaries(7) == []
    assert directory.choose()[1] == []


def test_a_directory_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    assert directory.choose() == (None, [])
    assert directory.remove_stale_temporaries(3) == []


def test_files_besides_are_left_alone(tmp_path: Path) -> None:
    report = save(tmp_path, 1)
    (report.checkpoint.path / "notes.txt").write_text("mine")
    assert CheckpointDirectory(tmp_path).verify(report.checkpoint) == []


WEIGHTS, OPTIMIZER = "weights-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors"


def break_step_2(path: Path, how: str) -> None:
    manifest = path / "manifest.json"
    match how:
        case "data":
            flip_bit(path / OPTIMIZER, -1, 7)
        case "header":
            flip_bit(path / WEIGHTS, 20)
        case "manifest":
            flip_bit(manifest, manifest.read_bytes().index(b'"float32"') + 6)
        case "torn":
            manifest.write_bytes(manifest.read_bytes()[:-30])
        case "short":
            (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])
        case "long":
            (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes() + b"\0")
        case "missing":
            (path / OPTIMIZER).unlink()
        case "no manifest":
            manifest.unlink()
        case "version":
            manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
        case "other":
            shutil.copy(path.parent / "step-00000001-attempt-001" / "manifest.json", manifest)
        case "gap":
            whole = parse(manifest.read_bytes())
            part = whole.entries[0].model_copy(update={"flat_range": (0, 1)})
            manifest.write_text(serialise(whole.model_copy(update={"entries": (part, *whole.entries[1:])})))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("data", f"{OPTIMIZER} does not match its digest"),
        ("header", f"{WEIGHTS} does not match its digest"),
        ("manifest", "manifest does not match its own digest"),
        ("torn", "manifest is torn"),
        ("short", f"{WEIGHTS} is short"),
        ("long", f"{WEIGHTS} is long"),
        ("missing", f"{OPTIMIZER} is missing"),
        ("no manifest", "never completed"),
        ("version", "format version 2 is unknown"),
        ("other", "its manifest is that of step 1, attempt 1"),
        ("gap", "has 1 of its 3 elements"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, how: str, why: str) -> None:
    good = save(tmp_path, 1).checkpoint
    bad = save(tmp_path, 2).checkpoint
    break_step_2(bad.path, how)
    directory = CheckpointDirectory(tmp_path)
    assert (tmp_path / "latest").read_text() == f"{bad.name}\n"
    chosen, passed_over = directory.choose()
    assert chosen == good
    assert [name for name, _ in passed_over] == [bad.name]
    assert why in passed_over[0][1]
    chosen, passed_over = directory.choose(verify=False)
    assert (chosen == bad) == (how in ("data", "header"))


def test_latest_is_not_believed(tmp_path: Path) -> None:
    newest = save(tmp_path, 2).checkpoint
    for text in ["", "step-00000009-attempt-009", "../elsewhere"]:
        (tmp_path / "latest").write_text(text)
        assert CheckpointDirectory(tmp_path).choose() == (newest, [])


def test_what_is_committed_while_it_is_fenced_off_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save(tmp_path, 1).checkpoint
    manifest = checkpoint.manifest_file.read_bytes()
    checkpoint.manifest_file.unlink()
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if source == checkpoint.path:  # just before it is moved away
            checkpoint.manifest_file.write_bytes(manifest)
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    directory = CheckpointDirectory(tmp_path)
    assert directory.remove_stale_temporaries(2) == []
    assert directory.choose() == (checkpoint, [])


def test_what_gets_its_name_while_it_is_fenced_off_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    checkpoint = directory.checkpoint(1, 1)
    checkpoint.temporary.mkdir()
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if checkpoint.temporary.exists():
            original(checkpoint.temporary, checkpoint.path)
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert directory.remove_stale_temporaries(2) == [checkpoint.name]
    assert list(tmp_path.iterdir()) == []


def test_only_what_older_attempts_left_unfinished_is_removed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    committed = save(tmp_path, 1).checkpoint
    for step, attempt in [(2, 1), (3, 2), (4, 3)]:
        temporary, renamed = directory.checkpoint(step, attempt), directory.checkpoint(step + 10, attempt)
        temporary.temporary.mkdir()
        (temporary.temporary / WEIGHTS).touch()
        renamed.path.mkdir()
    shutil.copytree(committed.path, tmp_path / ".tmp-step-00000020-attempt-001")  # whatever it is, it is not ours
    (tmp_path / ".stale-1-step-00000002-attempt-001").mkdir()
    removed = directory.remove_stale_temporaries(3)
    assert sorted(removed) == [
        ".tmp-step-00000002-attempt-001", ".tmp-step-00000003-attempt-002",
        "step-00000012-attempt-001", "step-00000013-attempt-002",
    ]  # fmt: skip
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        ".tmp-step-00000004-attempt-003", ".tmp-step-00000020-attempt-001", "latest", committed.name,
        "step-00000014-attempt-003",
    ]  # fmt: skip
    assert files_of(committed) == ["manifest.json", OPTIMIZER, WEIGHTS]
