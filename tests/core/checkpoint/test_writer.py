import builtins
import errno
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from scaling_slurm.core.checkpoint import tensor_file
from scaling_slurm.core.checkpoint.directory import CheckpointDirectory
from scaling_slurm.core.checkpoint.manifest import CheckpointError
from scaling_slurm.core.checkpoint.reader import read
from scaling_slurm.core.checkpoint.writer import deal
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import RefusedError
from scaling_slurm.run_directory import RunDirectory
from tests.support.checkpoints import files_of, flip_bit, infos_of, make_tensors, save
from tests.support.distributed import run_ranks

WEIGHTS, OPTIMIZER = "weights-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors"


def assert_holds(path: Path, *steps: int) -> int:
    """The newest whole checkpoint is that of one of these steps, bit for bit; which one."""
    chosen, _ = CheckpointDirectory(path).choose()
    assert chosen is not None
    assert chosen.step in steps
    found = {key: torch.empty_like(tensor) for key, tensor in make_tensors(0).items()}
    read(chosen, found)
    assert all(torch.equal(found[key], tensor) for key, tensor in make_tensors(chosen.step).items())
    return chosen.step


def garbage(path: Path) -> list[str]:
    """What is neither `latest` nor a committed checkpoint."""
    committed = [checkpoint.name for checkpoint in CheckpointDirectory(path).committed()]
    return sorted(name for name in os.listdir(path) if name not in ["latest", *committed])


def test_what_is_on_disk(tmp_path: Path) -> None:
    report = save(tmp_path, 120, attempt=2)
    path = tmp_path / "step-00000120-attempt-002"
    assert report.checkpoint.path == path
    assert files_of(report.checkpoint) == ["manifest.json", OPTIMIZER, WEIGHTS]
    assert (tmp_path / "latest").read_text() == "step-00000120-attempt-002\n"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000120-attempt-002"]
    assert report.bytes == sum((path / name).stat().st_size for name in [OPTIMIZER, WEIGHTS])
    record = json.loads((path / "manifest.json").read_text())
    assert (record["format_version"], record["step"], record["attempt"]) == (1, 120, 2)
    assert record["state"] == {"consumed_samples": 960}
    assert record["layout"] == {"tensor": 1, "pipeline": 1, "data": 1}
    assert record["data_fingerprint"] == "fingerprint"
    tensors = make_tensors(120)
    weights = safetensors.torch.load_file(path / WEIGHTS)
    assert {f"weight/{name}" for name in weights} == {key for key in tensors if key.startswith("weight/")}
    assert torch.equal(weights["layers.2.w"], tensors["weight/layers.2.w"])
    assert torch.equal(
        safetensors.torch.load_file(path / OPTIMIZER)["exp_avg/layers.2.w"], tensors["exp_avg/layers.2.w"]
    )


def test_a_committed_checkpoint_is_never_written_again(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    before = (first.checkpoint.path / "manifest.json").stat().st_mtime_ns
    with pytest.raises(RefusedError, match=r"step-00000001-attempt-001 exists; a committed checkpoint is never"):
        save(tmp_path, 1, tensors=make_tensors(7))
    assert (first.checkpoint.path / "manifest.json").stat().st_mtime_ns == before
    assert_holds(tmp_path, 1)
    save(tmp_path, 1, attempt=2)
    assert len(CheckpointDirectory(tmp_path).committed()) == 2


def test_a_damaged_one_is_not_written_again_either(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1).checkpoint
    flip_bit(checkpoint.manifest_file, 50)
    with pytest.raises(RefusedError):
        save(tmp_path, 1)
    assert files_of(checkpoint) == ["manifest.json", OPTIMIZER, WEIGHTS]


def test_tensors_must_be_the_state_of_the_parameters(tmp_path: Path) -> None:
    good = make_tensors(1)
    infos = infos_of(good)
    for tensors, message in [
        ({key: good[key] for key in good if key != "weight/layers.3.b"}, r"no weight was given for layers\.3\.b"),
        (good | {"weight/other": torch.zeros(1)}, "weight/other is not the state of a parameter"),
        (good | {"gradient/layers.3.b": torch.zeros(3)}, r"gradient/layers\.3\.b is not the state of a parameter"),
        (good | {"exp_avg/layers.3.b": torch.zeros(4)}, r"exp_avg/layers\.3\.b has shape \(4,\), its parameter \(3,\)"),
        (good | {"weight/layers.3.b": torch.zeros(3, dtype=torch.int64)}, r"has dtype torch\.int64"),
    ]:
        with pytest.raises(CheckpointError, match=rf"checkpoint of step 1 was not written: rank 0: .*{message}"):
            save(tmp_path, 1, tensors=tensors, infos=infos)
    with pytest.raises(CheckpointError, match="state or config of step 1 is not JSON"):
        save(tmp_path, 1, state={"loss": float("inf")})
    assert garbage(tmp_path) == []


def test_the_deal_is_even_and_does_not_depend_on_the_order() -> None:
    tensors = {f"weight/{index}": torch.empty(size) for index, size in enumerate([100, 1, 50, 50, 99, 2, 0])}
    shares = deal(tensors, 3)
    assert shares == [["weight/0", "weight/1"], ["weight/4", "weight/5"], ["weight/2", "weight/3", "weight/6"]]
    assert deal(dict(reversed(tensors.items())), 3) == shares


# What happens on disk, and in which order


class Disk:
    """Records file operations, and lets those fail that `breaks` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace: list[tuple[str, str]] = []
        self.breaks: Callable[[int, str, str], int | None] = lambda number, operation, name: None
        for operation in ["open", "write", "fsync", "mkdir", "rename", "replace"]:
            monkeypatch.setattr(os, operation, self._wrap(operation, getattr(os, operation)))
        monkeypatch.setattr(builtins, "open", self._wrap("open", builtins.open))

    def _wrap(self, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **more: Any) -> Any:
            name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            if "checkpoints" not in name:
                return original(first, *args, **more)
            if operation in ("rename", "replace"):
                name = os.fspath(args[0])
            code = self.breaks(len(self.trace), operation, name)
            self.trace.append((operation, name.partition("checkpoints")[2].lstrip("/")))
            if code:
                raise OSError(code, os.strerror(code))
            return original(first, *args, **more)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(tensor_file, "_RETRY_SECONDS", (0.0, 0.0))
    with monkeypatch.context() as patches:
        yield Disk(patches)


def test_the_order_of_operations(tmp_path: Path, disk: Disk) -> None:
    save(tmp_path / "checkpoints", 5)
    final = "step-00000005-attempt-001"
    durable = [step for step in disk.trace if step[0] in ("fsync", "rename", "replace")]
    assert [(operation, name) for operation, name in durable if "host" not in name] == [
        ("fsync", f".tmp-{final}/{OPTIMIZER}"),
        ("fsync", f".tmp-{final}/{WEIGHTS}"),
        ("rename", final),
        ("fsync", final),
        ("fsync", ""),
        ("fsync", f"{final}/.manifest.json.{os.uname().nodename}.{os.getpid()}"),
        ("replace", f"{final}/manifest.json"),
        ("fsync", final),
        ("fsync", f".latest.{os.uname().nodename}.{os.getpid()}"),
        ("replace", "latest"),
    ]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_of_any_operation_leaves_the_previous_or_the_new(
    tmp_path: Path, disk: Disk, code: int, lasting: bool
) -> None:
    save(tmp_path / "checkpoints", 1)
    num_operations = len(disk.trace)
    assert num_operations > 15
    outcomes = set()
    for broken in range(num_operations):
        path = tmp_path / str(broken) / "checkpoints"
        save(path, 1)
        disk.trace.clear()
        disk.breaks = lambda number, *_, at=broken: code if number == at or (lasting and number > at) else None
        message = ""
        try:
            save(path, 2)
        except CheckpointError as error:
            message = str(error)
        disk.breaks = lambda *_: None
        found = assert_holds(path, 1, 2)
        assert bool(message) == (found == 1)
        if message:
            assert f"step 2 was not written: rank 0: OSError: [Errno {code}]" in message
            assert lasting or garbage(path) == []  # nothing can be removed from a disk that cannot even be listed
            save(path, 2)
            assert_holds(path, 2)
        outcomes.add(found)
    assert outcomes == {1, 2}


def test_a_transient_error_does_not_lose_the_checkpoint(tmp_path: Path, disk: Disk) -> None:
    for code, operation in [(errno.EIO, "fsync"), (errno.ESTALE, "open"), (errno.EIO, "write")]:
        disk.trace.clear()
        failed: list[str] = []

        def breaks(_: int, what: str, name: str, code: int = code, operation: str = operation) -> int | None:
            if what == operation and WEIGHTS in name and len(failed) < 2:  # noqa: B023
                failed.append(name)  # noqa: B023
                return code
            return None

        disk.breaks = breaks
        step = len(list(tmp_path.glob("checkpoints/step*"))) + 1
        save(tmp_path / "checkpoints", step)
        assert len(failed) == 2
        disk.breaks = lambda *_: None
        assert_holds(tmp_path / "checkpoints", step)


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:7])))
    save(tmp_path, 3)
    monkeypatch.undo()
    assert_holds(tmp_path, 3)


def save_for_ever(path: Path, start: int) -> None:
    for step in range(start, start + 10**6):
        save(path, step)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    save(tmp_path, 0)
    newest, chance, unfinished = 0, random.Random(0), 0
    for _ in range(25):
        process = context.Process(target=save_for_ever, args=(tmp_path, newest + 1))
        process.start()
        before = time.monotonic()
        while not (tmp_path / f"step-{newest + 1:08d}-attempt-001").exists() and time.monotonic() < before + 20:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        unfinished += len(garbage(tmp_path))
        last = max(checkpoint.step for checkpoint in CheckpointDirectory(tmp_path).committed())
        newest = assert_holds(tmp_path, last)
        CheckpointDirectory(tmp_path).remove_stale_temporaries(2)
        assert [name for name in garbage(tmp_path) if not name.startswith(".latest")] == []
        for old in CheckpointDirectory(tmp_path).committed()[1:]:
            shutil.rmtree(old.path)
    assert unfinished > 5, "the kills did not hit any save"


# A full disk


def test_a_disk_that_is_too_full_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    room = SimpleNamespace(f_bavail=1, f_frsize=512, f_files=100, f_favail=50)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    with pytest.raises(CheckpointError, match=r"rank 0 sees a full disk: 0\.00 GiB are free"):
        save(tmp_path, 2)
    room.f_bavail, room.f_favail = 10**9, 4
    with pytest.raises(CheckpointError, match="room for 4 files, 5 are needed"):
        save(tmp_path, 2)
    assert garbage(tmp_path) == []
    room.f_files, room.f_favail = 0, 0  # a file system without a fixed number of files
    save(tmp_path, 2)
    assert_holds(tmp_path, 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_disk_that_fills_up_keeps_the_previous(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_disk / "checkpoints"
    save(path, 1)
    real = os.statvfs(path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10**9, f_frsize=real.f_frsize, f_files=0))
    failed = []
    for step in range(2, 40):
        try:
            save(path, step)
        except CheckpointError as error:
            assert "No space left on device" in str(error)  # noqa: PT017
            failed.append(step)
    assert failed
    assert failed == list(range(failed[0], 40))
    assert_holds(path, failed[0] - 1)
    assert garbage(path) == []


# Two attempts at once


def test_an_old_attempt_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(RefusedError, match="attempt 1 may not write checkpoints: a newer attempt"):
        save(tmp_path, 2, is_current=lambda: False)
    assert_holds(tmp_path, 1)
    assert garbage(tmp_path) == []


def test_an_old_attempt_cannot_commit_from_wherever_it_was(tmp_path: Path, disk: Disk) -> None:
    """A newer attempt begins just before each single file operation of an old one's save."""
    outcomes = []
    for moment in range(100):
        run = RunDirectory(tmp_path / str(moment))
        old = run.claim_attempt().number
        save(run.checkpoints, 1, attempt=old)
        disk.trace.clear()
        directory, chosen = CheckpointDirectory(run.checkpoints), None

        def newer_attempt(number: int, *_: str) -> None:
            nonlocal chosen
            if number == moment:  # noqa: B023
                disk.breaks = lambda *_: None
                attempt = run.claim_attempt().number  # noqa: B023
                directory.remove_stale_temporaries(attempt)  # noqa: B023
                chosen = directory.choose()[0]  # noqa: B023
                save(run.checkpoints, 2, attempt=attempt)  # noqa: B023

        disk.breaks = newer_attempt
        try:
            save(run.checkpoints, 2, attempt=old, is_current=lambda: run.is_current(old))  # noqa: B023
            refused = False
        except RefusedError:
            refused = True
        disk.breaks = lambda *_: None
        if chosen is None:
            break
        committed = [(one.step, one.attempt) for one in directory.committed()]
        assert committed == ([(2, 2), (1, 1)] if refused else [(2, 2), (2, 1), (1, 1)])
        assert (chosen.step, chosen.attempt) == ((1, 1) if refused else (2, 1)), "committed after the other had chosen"
        if disk.trace[-1][1] != "latest":
            assert directory.latest_file.read_text() == "step-00000002-attempt-002\n"
        assert [name for name in garbage(run.checkpoints) if not name.startswith(".latest")] == []
        outcomes.append(refused)
    assert outcomes.count(True) > 10
    assert outcomes.count(False) >= 3


def test_a_save_that_outlives_its_attempt_between_check_and_commit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    old = run.claim_attempt().number
    asked = 0

    def is_current() -> bool:
        nonlocal asked
        asked += 1
        answer = run.is_current(old)
        if asked == 2:  # the last time before the manifest: the answer is already out of date when it arrives
            CheckpointDirectory(run.checkpoints).remove_stale_temporaries(run.claim_attempt().number)
        return answer

    with pytest.raises(RefusedError, match="a newer attempt"):
        save(run.checkpoints, 2, attempt=old, is_current=is_current)
    assert os.listdir(run.checkpoints) == []


def test_an_overtaken_attempt_takes_nothing_back(tmp_path: Path, disk: Disk) -> None:
    """Its commit succeeded, then its directory was gone for a moment: the newer attempt judged it and put it back."""
    path, current = tmp_path / "checkpoints", [True]
    save(path, 1)

    def breaks(_: int, operation: str, name: str) -> int | None:
        if (operation, Path(name).name) == ("fsync", "step-00000002-attempt-001") and disk.trace[-2][0] == "replace":
            current[0] = False
            return errno.ENOENT
        return None

    disk.breaks = breaks
    with pytest.raises(RefusedError, match="a newer attempt"):
        save(path, 2, is_current=lambda: current[0])
    disk.breaks = lambda *_: None
    assert_holds(path, 2)


def test_one_that_is_overtaken_after_its_commit_leaves_latest_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    answers = iter([True, True, False])
    save(tmp_path, 2, is_current=lambda: next(answers))
    assert_holds(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "step-00000001-attempt-001\n"


# Several ranks


def save_on_ranks(topology: Topology, path: Path) -> tuple[int, list[str]]:
    report = save(path, 3, topology=topology)
    return report.bytes, files_of(report.checkpoint)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_writes_its_own_files(tmp_path: Path, num_ranks: int) -> None:
    reports = run_ranks(num_ranks, save_on_ranks, tmp_path)
    assert all(report == reports[0] for report in reports)
    assert reports[0][1] == ["manifest.json"] + [
        f"{family}-{rank:05d}-of-{num_ranks:05d}.safetensors"
        for family in ["optimizer", "weights"]
        for rank in range(num_ranks)
    ]
    assert_holds(tmp_path, 3)
    chosen, _ = CheckpointDirectory(tmp_path).choose()
    assert chosen is not None
    sizes = [record.bytes for name, record in chosen.manifest.files.items() if name.startswith("opt")]
    assert max(sizes) < 2 * min(sizes)


def save_one_tensor(topology: Topology, path: Path) -> list[str]:
    return files_of(save(path, 1, tensors={"weight/w": torch.ones(2)}, topology=topology).checkpoint)


def test_ranks_without_tensors_write_no_file(tmp_path: Path) -> None:
    assert run_ranks(3, save_one_tensor, tmp_path) == [["manifest.json", WEIGHTS]] * 3
    assert CheckpointDirectory(tmp_path).choose()[1] == []


def save_with_faults(topology: Topology, path: Path) -> list[str]:
    """Each rank in turn fails in each phase: every rank tells the same, and the next save works."""
    messages = []
    attempts = [True]
    for step, (rank, operation) in enumerate([(1, "statvfs"), (0, "mkdir"), (1, "write"), (0, "fsync"), (0, "rename")]):
        with pytest.MonkeyPatch.context() as patches:
            if topology.rank == rank:

                def fail(*_: Any) -> None:
                    raise OSError(errno.ENOSPC, f"no room on {topology.rank}")

                patches.setattr(os, operation, fail)
            try:
                save(path, step, topology=topology)
            except CheckpointError as error:
                messages.append(str(error))
        save(path, step, topology=topology)
    with pytest.raises(RefusedError):
        save(path, 9, topology=topology, is_current=lambda: topology.rank != 0 or bool(attempts and attempts.pop()))
    return messages


def test_what_one_rank_cannot_do_all_ranks_report(tmp_path: Path) -> None:
    messages = run_ranks(2, save_with_faults, tmp_path)
    assert messages[0] == messages[1]
    ranks = [1, 0, 1, 0, 0]
    assert messages[0] == [
        f"checkpoint of step {step} was not written: rank {rank}: OSError: [Errno 28] no room on {rank}"
        for step, rank in enumerate(ranks)
    ]
    assert [one.step for one in CheckpointDirectory(tmp_path).committed()] == [4, 3, 2, 1, 0]
    assert garbage(tmp_path) == []
    assert (tmp_path / "latest").read_text() == "step-00000004-attempt-001\n"
