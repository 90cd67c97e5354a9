"""Writes a checkpoint from all ranks at once, so that a crash at any moment leaves the previous one or the new one.

Knows no model and no loop. Every tensor is written by the rank that it was dealt to; ranks exchange only entries,
digests and errors.
"""

import contextlib
import heapq
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast, get_args

from torch import Tensor

from scaling_slurm.core.checkpoint.directory import Checkpoint, CheckpointDirectory
from scaling_slurm.core.checkpoint.manifest import (
    CheckpointError,
    Entry,
    FileRecord,
    Kind,
    Manifest,
    coverage_problems,
    serialise,
)
from scaling_slurm.core.checkpoint.tensor_file import DTYPE_NAMES, describe, write_file
from scaling_slurm.core.parameter import ParameterInfo
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import RefusedError
from scaling_slurm.run_directory import sync_directory, write_atomically

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class SaveReport:
    """What one save cost; the same bytes on all ranks, each its own seconds."""

    checkpoint: Checkpoint
    bytes: int
    """Of all files together."""
    seconds: float


@dataclass(frozen=True)
class _Plan:
    """What one rank will write, and what room it sees."""

    families: tuple[str, ...]
    needed: int
    free_bytes: int
    free_files: int | None


@dataclass(frozen=True)
class _Written:
    files: dict[str, FileRecord]
    entries: list[Entry]


@dataclass(frozen=True)
class _Outcome(Generic[_T]):
    result: _T | None = None
    failure: str = ""
    refused: bool = False


class CheckpointWriter:
    """Saves the checkpoints of one attempt. All ranks construct it, and call save alike.

    `is_current` says whether no newer attempt of the run has started.
    """

    def __init__(
        self, directory: CheckpointDirectory, topology: Topology, *, attempt: int, is_current: Callable[[], bool]
    ) -> None:
        self._directory, self._topology = directory, topology
        self._attempt, self._is_current = attempt, is_current

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        infos: Sequence[ParameterInfo],
        *,
        state: dict[str, Any],
        config: dict[str, Any],
        data_fingerprint: str,
    ) -> SaveReport:
        """Write and commit the checkpoint of a step; returns when it is durable.

        `tensors` holds full logical tensors by "kind/logical name", equal on all data ranks. Raises the same error on
        all ranks: CheckpointError when any of them failed, RefusedError when a newer attempt has started or the
        checkpoint exists. Nothing is committed then.
        """
        started, layout = time.perf_counter(), self._topology.layout
        checkpoint = self._directory.checkpoint(step, self._attempt)

        def commit(written: list[_Written]) -> None:
            manifest = Manifest(
                step=step,
                attempt=self._attempt,
                written_at=datetime.now(UTC).isoformat(timespec="seconds"),
                state=state,
                config=config,
                layout={"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data},
                data_fingerprint=data_fingerprint,
                files={name: record for one in written for name, record in one.files.items()},
                entries=tuple(entry for one in written for entry in one.entries),
            )
            self._commit(checkpoint, manifest)

        try:
            plans = self._together(step, lambda: self._prepare(checkpoint, tensors, infos))
            _check_room(step, plans)
            written = self._together(step, lambda: self._write(checkpoint, tensors, plans))
            self._together(step, lambda: commit(written) if self._topology.rank == 0 else None)
        except (CheckpointError, RefusedError):
            self._discard(checkpoint)
            raise
        num_bytes = sum(record.bytes for one in written for record in one.files.values())
        return SaveReport(checkpoint, num_bytes, time.perf_counter() - started)

    def _together(self, step: int, action: Callable[[], _T]) -> list[_T]:
        """Every rank's result; what any rank raises, all raise."""
        outcome: _Outcome[_T]
        try:
            outcome = _Outcome(action())
        except Exception as error:
            outcome = self._failed(error)
        outcomes: list[_Outcome[_T]] = self._topology.all_gather_object(outcome)
        if refusal := next((one for one in outcomes if one.refused), None):
            raise RefusedError(refusal.failure)
        if failed := [(rank, one.failure) for rank, one in enumerate(outcomes) if one.failure]:
            rank, cause = failed[0]
            also = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
            raise CheckpointError(f"checkpoint of step {step} was not written: rank {rank}: {cause}{also}")
        return [cast(_T, one.result) for one in outcomes]

    def _failed(self, error: Exception) -> _Outcome[Any]:
        if isinstance(error, FileNotFoundError):  # a newer attempt moves the directory away, and only then it says so
            with contextlib.suppress(OSError):
                error = error if self._is_current() else self._superseded()
        if isinstance(error, RefusedError):
            return _Outcome(failure=str(error), refused=True)
        logger.warning("saving failed on this rank", exc_info=error)
        return _Outcome(
            failure=str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        )

    def _superseded(self) -> RefusedError:
        return RefusedError(
            f"attempt {self._attempt} may not write checkpoints: a newer attempt of the run has started"
        )

    def _prepare(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], infos: Sequence[ParameterInfo]) -> _Plan:
        _check_tensors(tensors, infos)
        self._directory.path.mkdir(parents=True, exist_ok=True)
        if self._topology.rank == 0:
            if not self._is_current():
                raise self._superseded()
            if checkpoint.is_committed:
                raise RefusedError(f"{checkpoint.path} exists", "a committed checkpoint is never written again")
            self._discard(checkpoint)  # of a save that failed
            os.mkdir(checkpoint.temporary)
        mine = self._owned(tensors)
        room = os.statvfs(self._directory.path)
        return _Plan(
            families=tuple(mine),
            needed=sum(tensor.nbytes for owned in mine.values() for tensor in owned.values()),
            free_bytes=room.f_bavail * room.f_frsize,
            free_files=room.f_favail if room.f_files else None,
        )

    def _owned(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """This rank's tensors by family of files, then "kind/name"."""
        share = deal(tensors, self._topology.layout.data)[self._topology.data_rank]
        owned: dict[str, dict[str, Tensor]] = {}
        for key in share:
            owned.setdefault("weights" if key.startswith("weight/") else "optimizer", {})[key] = tensors[key]
        return owned

    def _write(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], plans: list[_Plan]) -> _Written:
        written = _Written({}, [])
        for family, owned in self._owned(tensors).items():
            writers = [rank for rank, plan in enumerate(plans) if family in plan.families]
            file = f"{family}-{writers.index(self._topology.rank):05d}-of-{len(writers):05d}.safetensors"
            header, entries = describe(file, owned)
            ordered = [owned[entry.key] for entry in entries]
            written.files[file] = write_file(checkpoint.temporary / file, header, ordered)
            written.entries.extend(entries)
        return written

    def _commit(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        if problems := coverage_problems(manifest.entries):
            raise CheckpointError("; ".join(problems))
        text = serialise(manifest)
        os.rename(checkpoint.temporary, checkpoint.path)
        sync_directory(checkpoint.path)
        sync_directory(self._directory.path)
        if not self._is_current():
            raise self._superseded()
        try:
            write_atomically(checkpoint.manifest_file, text)
            sync_directory(checkpoint.path)
        except OSError:
            with contextlib.suppress(OSError):
                if self._is_current():  # else a newer attempt may have started from it
                    checkpoint.manifest_file.unlink()
            raise
        try:
            if self._is_current():
                self._directory.write_latest(checkpoint)
        except OSError as error:
            logger.warning("%s is committed, but `latest` could not be written: %s", checkpoint.name, error)

    def _discard(self, checkpoint: Checkpoint) -> None:
        """Rank 0 removes what is not committed, as far as the file system lets it."""
        if self._topology.rank == 0:
            shutil.rmtree(checkpoint.temporary, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._directory.remove_unfinished(checkpoint.path)


def deal(tensors: Mapping[str, Tensor], num_ranks: int) -> list[list[str]]:
    """Names for each rank: largest first, each to the rank with the fewest bytes so far. The same on all ranks."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for key in sorted(tensors, key=lambda key: (-tensors[key].nbytes, key)):
        load, rank = loads[0]
        shares[rank].append(key)
        heapq.heapreplace(loads, (load + tensors[key].nbytes, rank))
    return shares


def _check_tensors(tensors: Mapping[str, Tensor], infos: Sequence[ParameterInfo]) -> None:
    """Every parameter has its weight, and every tensor is a full one of a known parameter."""
    shapes = {info.name: tuple(info.shape) for info in infos}
    if missing := [name for name in shapes if f"weight/{name}" not in tensors]:
        raise CheckpointError(f"no weight was given for {', '.join(missing)}")
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in get_args(Kind) or name not in shapes:
            raise CheckpointError(f"{key} is not the state of a parameter")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(f"{key} has shape {tuple(tensor.shape)}, its parameter {shapes[name]}")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key} has dtype {tensor.dtype}, which a checkpoint does not hold")


def _check_room(step: int, plans: list[_Plan]) -> None:
    """All ranks come to the same answer, from what all of them saw."""
    needed, files = sum(plan.needed for plan in plans), sum(len(plan.families) for plan in plans) + 3
    for rank, plan in enumerate(plans):
        if plan.free_bytes < 1.1 * needed:
            short = f"{plan.free_bytes / 2**30:.2f} GiB are free, {1.1 * needed / 2**30:.2f} GiB are needed"
        elif plan.free_files is not None and plan.free_files < files:
            short = f"room for {plan.free_files} files, {files} are needed"
        else:
            continue
        raise CheckpointError(f"checkpoint of step {step} was not written: rank {rank} sees a full disk: {short}")
