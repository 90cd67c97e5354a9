"""The checkpoints of a run on disk: names, which are whole, which to start from. Knows no torch and writes no data.

How an old attempt is fenced off. A new attempt (1) claims its number, (2) moves away every directory of older attempts
that has no manifest, (3) chooses. A writer (a) has its directory under the final name, (b) asks whether its attempt is
still the newest, (c) renames the manifest into place by path. If (b) said yes it came before (1), so the directory is
there at (2): either (c) came before (2), and the checkpoint is whole and seen by (3), or (c) finds no such path, fails.
"""

import os
import re
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from scaling_slurm.core.checkpoint.manifest import CheckpointError, FileRecord, Manifest, coverage_problems, parse
from scaling_slurm.run_directory import write_atomically

_NAME = re.compile(r"(?:\.tmp-)?step-(?P<step>\d{8,})-attempt-(?P<attempt>\d{3,})")
_STALE = ".stale-"
_READ_BYTES = 8 << 20


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A directory with a checkpoint's name; sorted by step, then attempt, as numbers."""

    step: int
    attempt: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def temporary(self) -> Path:
        """Where it is written before it gets its name."""
        return self.path.with_name(f".tmp-{self.name}")

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def is_committed(self) -> bool:
        return self.manifest_file.is_file()

    @cached_property
    def manifest(self) -> Manifest:
        """Parsed and checked against its own digest; raises CheckpointError."""
        try:
            text = self.manifest_file.read_bytes()
        except FileNotFoundError:
            raise CheckpointError("no manifest.json: it was never completed") from None
        except OSError as error:
            raise CheckpointError(f"manifest.json cannot be read: {error.strerror}") from error
        manifest = parse(text)
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise CheckpointError(
                f"its manifest is that of step {manifest.step}, attempt {manifest.attempt}",
                "a checkpoint directory must keep its name",
            )
        return manifest

    def problems(self) -> list[str]:
        """What is wrong with the manifest itself; the files are not looked at."""
        try:
            return coverage_problems(self.manifest.entries)
        except CheckpointError as error:
            return [str(error)]

    def file_problem(self, name: str, record: FileRecord, *, digest: bool = True) -> str | None:
        """What is wrong with one file: missing, short, long, unreadable, or other bytes than were written."""
        path = self.path / name
        try:
            size = path.stat().st_size
            if size != record.bytes:
                return f"{name} is {'short' if size < record.bytes else 'long'}: {size} of {record.bytes} bytes"
            if digest and digest_file(path) != record.xxh3_128:
                return f"{name} does not match its digest"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None


@dataclass(frozen=True)
class CheckpointDirectory:
    """`checkpoints/` of a run. Files that do not have a checkpoint's name are left alone."""

    path: Path

    @property
    def latest_file(self) -> Path:
        """Names the newest committed checkpoint, for people and scripts; nothing here believes it."""
        return self.path / "latest"

    def checkpoint(self, step: int, attempt: int) -> Checkpoint:
        """The checkpoint of that name, whether it exists or not."""
        return Checkpoint(step, attempt, self.path / f"step-{step:08d}-attempt-{attempt:03d}")

    def candidates(self) -> list[Checkpoint]:
        """Every directory with a checkpoint's name, newest first."""
        found = [checkpoint for checkpoint, temporary in self._directories() if not temporary]
        return sorted(found, reverse=True)

    def committed(self) -> list[Checkpoint]:
        """Those that have a manifest, newest first; whether they are whole, verify says."""
        return [checkpoint for checkpoint in self.candidates() if checkpoint.is_committed]

    def verify(self, checkpoint: Checkpoint, *, digests: bool = True) -> list[str]:
        """What is wrong with a checkpoint; reads every byte of it unless digests is False. Empty: nothing."""
        if problems := checkpoint.problems():
            return problems
        files = checkpoint.manifest.files.items()
        checked = (checkpoint.file_problem(name, record, digest=digests) for name, record in files)
        return [problem for problem in checked if problem]

    def choose(self, verify: bool = True) -> tuple[Checkpoint | None, list[tuple[str, str]]]:
        """The newest whole checkpoint, and the newer ones that were passed over with the reason for each.

        With verify False the digests of the files are not computed; everything else is still checked.
        """
        passed_over: list[tuple[str, str]] = []
        for checkpoint in self.candidates():
            problems = self.verify(checkpoint, digests=verify)
            if not problems:
                return checkpoint, passed_over
            passed_over.append((checkpoint.name, "; ".join(problems)))
        return None, passed_over

    def write_latest(self, checkpoint: Checkpoint) -> None:
        write_atomically(self.latest_file, checkpoint.name + "\n")

    def remove_stale_temporaries(self, current_attempt: int) -> list[str]:
        """Fence off older attempts, see the top of this file: by one rank, after the claim and before choose.

        Returns the names of the unfinished directories that were removed.
        """
        if not self.path.is_dir():
            return []
        removed: list[str] = []
        for leftover in self.path.glob(f"{_STALE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # a listing can miss one that its writer, still alive, has just renamed: look until there is none
        while stale := [path for path in self._unfinished() if _attempt(path) < current_attempt]:
            removed += [path.name for path in stale if self.remove_unfinished(path)]
        return removed

    def remove_unfinished(self, path: Path) -> bool:
        """Move away and remove a checkpoint's directory unless it has a manifest, or got one at the last moment."""
        if not path.is_dir() or (path / "manifest.json").exists():
            return False
        moved = self.path / f"{_STALE}{time.time_ns()}-{path.name}"
        try:
            os.rename(path, moved)
        except FileNotFoundError:
            return False  # its writer has just renamed it
        if (moved / "manifest.json").exists():
            os.rename(moved, path)
            return False
        shutil.rmtree(moved, ignore_errors=True)
        return True

    def _unfinished(self) -> list[Path]:
        paths = [
            checkpoint.temporary if temporary else checkpoint.path for checkpoint, temporary in self._directories()
        ]
        return [path for path in paths if not (path / "manifest.json").exists()]

    def _directories(self) -> list[tuple[Checkpoint, bool]]:
        """Checkpoints, and whether each is a temporary directory still."""
        if not self.path.is_dir():
            return []
        found = []
        for entry in os.scandir(self.path):
            match = _NAME.fullmatch(entry.name)
            if not match or not entry.is_dir():
                continue
            checkpoint = self.checkpoint(int(match["step"]), int(match["attempt"]))
            if entry.name in (checkpoint.name, checkpoint.temporary.name):  # not one with zeros too many
                found.append((checkpoint, entry.name != checkpoint.name))
        return found


def _attempt(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match["attempt"])


def digest_file(path: Path) -> str:
    """xxh3_128 of a file, in hexadecimal."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return str(state.hexdigest())
