"""Sends one job: submitit's executor with our own job script and a clean environment.

Knows nothing of what the script says but the command that starts submitit in every task.
"""

import contextlib
import importlib
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from submitit import Job, SlurmExecutor
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from scaling_slurm.errors import ConfigError, SchedulerUnreachableError
from scaling_slurm.slurm.commands import explain_refusal, scrubbed_environment


def task_command(folder: Path, python: str = shlex.quote(sys.executable)) -> str:
    """What every task runs, as shell text: submitit's entry, which calls the function that was sent.

    `python` is shell text too; a container's interpreter may be named.
    """
    return f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}"


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor for a job script that is already written, byte for byte.

    The script must hold `command`, export SUBMITIT_EXECUTOR=slurm, and start nodes x tasks_per_node tasks.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        command: str,
        *,
        nodes: int,
        tasks_per_node: int,
        time_minutes: int | None = None,
        path_prefix: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.script, self.command = script, command
        self.sent_environment = scrubbed_environment(environ)
        if path_prefix is not None:
            path = self.sent_environment.get("PATH", os.defpath)
            self.sent_environment["PATH"] = f"{path_prefix}{os.pathsep}{path}"
        if command not in script:
            raise ConfigError(
                "the job script does not start the tasks", f"it must hold the line {command!r}", "the job template"
            )
        python, _, rest = command.partition(" -u -m ")
        if not rest:
            raise ConfigError(f"{command!r} does not start submitit", "expected PYTHON -u -m submitit.core._submit")
        super().__init__(folder, python=python)
        # submitit derives the tasks whose results it expects, and its guess at a time-out, from these.
        self.update_parameters(nodes=nodes, ntasks_per_node=tasks_per_node)
        if time_minutes is not None:
            self.update_parameters(time=time_minutes)

    @classmethod
    def affinity(cls) -> int:
        """Always usable: submitit would look for srun on a PATH that need not be the one of the job."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        if command != self.command:
            raise ConfigError(f"the job script starts {self.command!r}, submitit would start {command!r}")
        return self.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        environ = self.sent_environment
        sbatch = shutil.which("sbatch", path=environ.get("PATH"))
        if sbatch is None:
            raise SchedulerUnreachableError(
                "sbatch is not on PATH", "this must run where Slurm is installed", "or use --cluster local"
            )
        # Only the differences: a command line can be read by everybody on the machine, and variables hold secrets.
        dropped = [f"--unset={name}" for name in os.environ if name not in environ]
        changed = [f"{name}={value}" for name, value in environ.items() if os.environ.get(name) != value]
        return ["env", *dropped, *changed, sbatch, str(submission_file_path)]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        # submitit builds a plain SlurmExecutor for an array, which would send its own script.
        if len(delayed_submissions) != 1:
            raise NotImplementedError("one script is one job: arrays of submissions are not supported")
        return super()._internal_process_submissions(delayed_submissions)


def send(
    folder: Path,
    script: str,
    command: str,
    function: Callable[[str], object],
    argument: str,
    *,
    nodes: int,
    tasks_per_node: int,
    time_minutes: int | None = None,
    path_prefix: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Send the script to Slurm; every task will call function(argument). Returns the job id.

    folder: submitit's, on the shared file system, without patterns such as %j. command: from task_command.
    Raises ConfigError before anything is written, SchedulerRefusedError and SchedulerUnreachableError from sbatch.
    """
    folder = folder.absolute()
    if "%" in str(folder):
        raise ConfigError(f"the folder {str(folder)!r} has a % in its name", "Slurm would read it as a pattern")
    if command != task_command(folder, command.partition(" -u -m ")[0]):
        raise ConfigError(f"the job script's command {command!r} does not start submitit in {folder}")
    _check_importable(function)
    executor = ScriptExecutor(
        folder, script, command, nodes=nodes, tasks_per_node=tasks_per_node, time_minutes=time_minutes,
        path_prefix=path_prefix, environ=environ,
    )  # fmt: skip
    with _no_leftovers(folder):
        try:
            # submitit prints sbatch's words itself before it raises them.
            with contextlib.redirect_stderr(io.StringIO()):
                job = executor.submit(function, argument)
        except (FailedJobError, FailedSubmissionError) as error:
            _raise_refusal(error)
    return str(job.job_id)


def _raise_refusal(error: Exception) -> NoReturn:
    raise explain_refusal(str(error)) from error


def _check_importable(function: Callable[..., object]) -> None:
    """A function that pickle can name; anything else would be stored by value and tie the job to this Python."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or getattr(importlib.import_module(module), name, None) is not function:
        raise ConfigError(f"{module}.{name} cannot be imported by the job", "send a function of a module's top level")


@contextlib.contextmanager
def _no_leftovers(folder: Path) -> Iterator[None]:
    """Remove the temporary files of this submission: all of them if it fails, the link to the script if it works."""
    existed, before = folder.exists(), set(folder.glob("*")) | set(folder.glob(".*"))
    failed = True
    try:
        yield
        failed = False
    finally:
        for path in (set(folder.glob("*")) | set(folder.glob(".*"))) - before:
            temporary = path.name.startswith(".submission_file_") or (path.suffix == ".pkl" and "_" not in path.name)
            if temporary and (failed or path.is_symlink()):
                path.unlink(missing_ok=True)
        if failed and not existed and folder.exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
