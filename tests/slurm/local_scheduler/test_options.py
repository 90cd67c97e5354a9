"""Options and #SBATCH lines as Slurm reads them."""

import signal

import pytest

from scaling_slurm.slurm.local_scheduler.options import (
    SlurmError,
    parse_count,
    parse_directives,
    parse_options,
    parse_signal,
    parse_time_limit,
    parse_warning,
    spread_tasks,
)


def test_long_and_short_options_and_the_command() -> None:
    options, rest = parse_options(
        ["-N2", "-n", "4", "--output=a=b", "--job-name", "x y", "-lu", "-K", "--requeue", "script", "-x", "--y"]
    )
    assert options == {
        "nodes": "2", "ntasks": "4", "output": "a=b", "job-name": "x y", "label": "yes", "unbuffered": "yes",
        "kill-on-bad-exit": "1", "requeue": "yes",
    }  # fmt: skip
    assert rest == ["script", "-x", "--y"]


def test_wait_is_a_flag_of_sbatch_and_a_time_of_srun() -> None:
    assert parse_options(["--wait", "x"]) == ({"wait": "yes"}, ["x"])
    assert parse_options(["--wait=60", "x"], wait_takes_value=True) == ({"wait": "60"}, ["x"])
    assert parse_options(["-W", "60", "x"], wait_takes_value=True) == ({"wait": "60"}, ["x"])


@pytest.mark.parametrize("words", [["--foo"], ["--nodes"], ["-Z"]])
def test_refused_options(words: list[str]) -> None:
    with pytest.raises(SlurmError) as raised:
        parse_options(words)
    assert raised.value.code == 255


def test_directives_end_at_the_first_command() -> None:
    script = """#!/bin/bash
#SBATCH --nodes=2 --job-name="a # b" # a comment
# another comment

#SBATCH --comment="say \\"hi\\" \\\\ bye"
#SBATCH --nodes=3
##SBATCH --nodes=9
echo
#SBATCH --nodes=10
"""
    assert parse_directives(script) == {"nodes": "3", "job-name": "a # b", "comment": 'say "hi" \\ bye'}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("5", 5), ("1:30", 2), ("30:00", 30), ("1:00:00", 60), ("1-0", 1440), ("1-2:3", 1563), ("0-0:1:0", 1),
        ("UNLIMITED", None), ("0", None),
    ],
)  # fmt: skip
def test_time_limit(text: str, minutes: float | None) -> None:
    assert parse_time_limit(text) == (None if minutes is None else minutes * 60)


@pytest.mark.parametrize("text", ["x", "1:2:3:4", "1h", "-5"])
def test_refused_time_limit(text: str) -> None:
    with pytest.raises(SlurmError, match="Invalid --time specification"):
        parse_time_limit(text)


def test_warning_and_signals() -> None:
    assert parse_warning("USR2@120") == (signal.SIGUSR2, 120.0, False)
    assert parse_warning("B:SIGTERM") == (signal.SIGTERM, 60.0, True)
    assert [parse_signal(text) for text in ("USR2", "SIGUSR2", "12", "usr2")] == [12] * 4
    with pytest.raises(SlurmError):
        parse_signal("NOPE")


def test_counts() -> None:
    assert parse_count({"nodes": "2-4"}, "nodes") == 2
    assert parse_count({}, "nodes") is None
    with pytest.raises(SlurmError, match="Invalid numeric value"):
        parse_count({"nodes": "0"}, "nodes")
    assert spread_tasks(5, 3) == [2, 2, 1]
