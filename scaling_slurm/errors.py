"""The errors a user may see, each with its documented exit code.

Knows nothing of what raised them. The command line prints the message without a traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `scaling` command and of the job script."""

    OK = 0
    UNEXPECTED = 1
    CONFIG = 2
    SCHEDULER_REFUSED = 4
    SCHEDULER_UNREACHABLE = 5
    NOT_FOUND = 6
    JOB_FAILED = 7
    REFUSED = 8
    REQUEUE = 75
    """Rank 0 saved, and the job script is to requeue the job."""
    INTERRUPTED = 130


class ScalingError(Exception):
    """One message in up to three parts: what is wrong, what would be right, where to change it."""

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, wrong: str, right: str = "", where: str = "") -> None:
        super().__init__("; ".join(part for part in (wrong, right, where) if part))
        self.wrong, self.right, self.where = wrong, right, where


class ConfigError(ScalingError):
    """A setting, a file or an argument that cannot be used."""

    exit_code = ExitCode.CONFIG


class SchedulerRefusedError(ScalingError):
    """The scheduler answered, and said no."""

    exit_code = ExitCode.SCHEDULER_REFUSED


class SchedulerUnreachableError(ScalingError):
    """The scheduler did not answer; trying again later may help."""

    exit_code = ExitCode.SCHEDULER_UNREACHABLE


class NotFoundError(ScalingError):
    """No such run, job or checkpoint."""

    exit_code = ExitCode.NOT_FOUND


class JobFailedError(ScalingError):
    """The job ran and failed."""

    exit_code = ExitCode.JOB_FAILED


class RefusedError(ScalingError):
    """Refused because it would be unsafe: the run is live, a newer attempt has taken over, a budget is used up."""

    exit_code = ExitCode.REFUSED
