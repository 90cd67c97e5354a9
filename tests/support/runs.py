"""Whole runs as a user makes them: the `scaling` command in a process of its own, and what a run has written."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaling_slurm.run_directory import RunDirectory, read_json, read_lines

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = ROOT / "tests" / "support" / "faults"

TINY = """\
name: tiny
allocation: {{nodes: 2, tasks_per_node: 2, time: "{time}"}}
model:
  vocab_size: 512
  hidden_size: 32
  num_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  intermediate_size: 64
  sequence_length: 32
  residual_dropout: 0.1
data: {{train: {data}/train, validation: {data}/validation}}
optimizer: {{learning_rate: 0.01, minimum_learning_rate: 0.001, warmup_steps: 5}}
trainer:
  num_steps: {steps}
  global_batch_size: 8
  micro_batch_size: 1
  save_interval: {save}
  evaluation_interval: 10
  evaluation_samples: 16
  record_samples: true
  timeout_minutes: 1
"""


@dataclass
class Workplace:
    """A directory with prepared data, in which `scaling` is called as a user would."""

    path: Path
    data: Path
    cluster: str
    environment: dict[str, str] = field(default_factory=dict)

    def config(self, name: str = "tiny.yaml", *, steps: int = 40, save: int = 10, time: str = "30:00") -> Path:
        """Write a run file for 2 nodes x 2 ranks."""
        file = self.path / name
        file.write_text(TINY.format(data=self.data, steps=steps, save=save, time=time))
        return file

    def scaling(
        self, *arguments: str | Path, code: int | None = 0, fault: str = "", timeout: float = 120, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the command; asserts its exit code unless `code` is None."""
        environment = os.environ | self.environment
        if fault:
            environment |= {"SCALING_TEST_FAULT": fault, "PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-m", "scaling_slurm", *map(str, arguments)],
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            input=stdin,
        )
        if code is not None:
            shown = f"{' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == code, f"exit code {done.returncode}, not {code}: {shown}"
        return done

    def submit(self, *arguments: str | Path, fault: str = "") -> "Run":
        """Submit to this workplace's cluster."""
        before = set((self.path / "runs").glob("*"))
        done = self.scaling("submit", *arguments, "--cluster", self.cluster, "-q", fault=fault)
        (directory,) = set((self.path / "runs").glob("*")) - before
        return Run(self, RunDirectory(directory), done.stdout.strip())


@dataclass
class Run:
    """A run that was submitted."""

    workplace: Workplace
    directory: RunDirectory
    job_id: str

    def losses(self, kind: str = "training") -> dict[int, float]:
        """Loss of each step; where a step was done twice, the last attempt counts, and both must agree."""
        losses: dict[int, float] = {}
        for record in read_lines(self.directory.metrics_file):
            if record["kind"] == kind:
                step, loss = record["step"], record["loss"]
                assert losses.get(step, loss) == loss, f"step {step} of attempt {record['attempt']}: another loss"
                losses[step] = loss
        return losses

    def samples(self) -> dict[int, list[int]]:
        """All ids of each step, rank after rank, by the last attempt that did it; recomputed steps must agree."""
        by_rank: dict[tuple[int, int], list[int]] = {}
        for file in sorted(self.directory.samples.glob("attempt-*-rank-*.jsonl")):
            rank = int(file.stem.rpartition("-")[2])
            for record in read_lines(file):
                key = (record["step"], rank)
                assert by_rank.get(key, record["samples"]) == record["samples"], f"{key} took other samples"
                by_rank[key] = record["samples"]
        by_step: dict[int, list[int]] = {}
        for (step, _), ids in sorted(by_rank.items()):
            by_step.setdefault(step, []).extend(ids)
        return by_step

    def last_step(self) -> int:
        return max(self.losses(), default=0)

    def causes(self) -> list[str | None]:
        """How each attempt ended; None where it left no word."""
        ends = (read_json(attempt.end_file) for attempt in self.directory.list_attempts())
        return [end["cause"] if end else None for end in ends]

    def state(self) -> str:
        done = self.workplace.scaling("status", self.directory.path, "--json")
        return str(json.loads(done.stdout)["state"])

    def wait(self, condition: Callable[[], object], seconds: float, what: str = "") -> None:
        """Wait until it holds; fails with the logs when it does not."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {what or condition}\n{self.report()}")
            time.sleep(0.1)

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        self.wait(lambda: self.last_step() >= step, seconds, f"step {step}")

    def wait_for_end(self, seconds: float = 120) -> None:
        live = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD"}
        self.wait(lambda: self.state() not in live, seconds, "the end of the job")

    def wait_until_finished(self, seconds: float = 120) -> None:
        self.wait(lambda: self.directory.finished_file.exists(), seconds, "the last step")

    def find_ranks(self) -> dict[int, int]:
        """The process of each rank that lives, wherever its node's namespace is."""
        ours, found = f"SCALING_RUN_DIRECTORY={self.directory.path}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            ranks = [entry for entry in environ if entry.startswith(b"SLURM_PROCID=")]
            if ours in environ and ranks and b"\0submitit.core._submit\0" in command and b"bash" not in command:
                found[int(ranks[0].partition(b"=")[2])] = int(folder.name)
        return found

    def find_rank(self, rank: int) -> int:
        return self.find_ranks()[rank]

    def report(self) -> str:
        """Everything that helps to understand a failed test."""
        return "\n".join(self._report())

    def _report(self) -> Iterator[str]:
        for file in sorted(self.directory.logs.glob("*")):
            yield f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"
        if self.directory.events_file.exists():
            yield f"--- events\n{self.directory.events_file.read_text()}"


def make_corpus(folder: Path) -> Path:
    """A small real text: some of the standard library's own sources."""
    import json as package

    corpus = folder / "corpus"
    corpus.mkdir()
    for source in sorted(Path(package.__file__).parent.glob("*.py")):
        (corpus / source.name).write_text(source.read_text())
    return corpus


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a developer's shell might hold that changes where runs go."""
    return {name: value for name, value in environment.items() if not name.startswith("SCALING_")}
