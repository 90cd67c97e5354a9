import inspect

import pytest

from scaling_slurm import errors
from scaling_slurm.errors import ConfigError, ExitCode, ScalingError


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("a is 1", "it should be 2", "run.yaml:3"), "a is 1; it should be 2; run.yaml:3"),
        (("a is 1", "", "run.yaml:3"), "a is 1; run.yaml:3"),
        (("a is 1",), "a is 1"),
    ],
)
def test_the_message_has_up_to_three_parts(parts: tuple[str, ...], line: str):
    assert str(ConfigError(*parts)) == line


def test_every_kind_of_error_has_the_documented_code_of_its_own():
    kinds = {kind.__name__: kind.exit_code for _, kind in inspect.getmembers(errors, inspect.isclass)
             if issubclass(kind, ScalingError)}  # fmt: skip
    assert kinds == {
        "ScalingError": 1,
        "ConfigError": 2,
        "SchedulerRefusedError": 4,
        "SchedulerUnreachableError": 5,
        "NotFoundError": 6,
        "JobFailedError": 7,
        "RefusedError": 8,
    }


def test_the_other_codes_are_those_of_scripts_and_shells():
    assert ExitCode.REQUEUE == 75, "EX_TEMPFAIL of sysexits.h, which the job template waits for"
    assert ExitCode.INTERRUPTED == 128 + 2
