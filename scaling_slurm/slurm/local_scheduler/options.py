"""Command lines of Slurm's programs and #SBATCH lines, read into long option names. Runs nothing."""

import re
import shlex
import signal
import sys
from typing import NamedTuple

SHORT = {
    "A": "account", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold", "J": "job-name",
    "K": "kill-on-bad-exit", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "W": "wait", "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input", "k": "no-kill",
    "l": "label", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe",
    "t": "time", "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_FLAG_NAMES = """
contiguous exact get-user-env hold kill-on-invalid-dep label no-kill no-requeue overcommit overlap oversubscribe
parsable quiet reboot requeue spread-job test-only unbuffered use-min-nodes verbose wait-all-nodes whole
"""
_VALUE_NAMES = """
account acctg-freq array bb bbf begin chdir cluster-constraint clusters comment constraint core-spec cores-per-socket
cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export
export-file extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags
hint input job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi network
nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
partition power prefer priority profile qos reservation segment signal sockets-per-node switches task-epilog
task-prolog thread-spec threads threads-per-core time time-min tmp uid wckey wrap
"""
FLAGS, VALUES = set(_FLAG_NAMES.split()), set(_VALUE_NAMES.split())
"""Options without and with a value. Those that mean nothing here are read and have no effect."""
OPTIONAL = {"exclusive": "yes", "kill-on-bad-exit": "1", "nice": "100", "propagate": "ALL"}
"""Options that take a value only with = , and what they mean without."""


class SlurmError(Exception):
    """A refusal in Slurm's own words; the program prints it and ends with the code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def fail(program: str, error: SlurmError) -> int:
    """Print the refusal as the program does; the value is its exit code."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return error.code


def parse_options(arguments: list[str], *, wait_takes_value: bool = False) -> tuple[dict[str, str], list[str]]:
    """Options by long name, and the rest from the first word that is none. Raises SlurmError for an unknown option.

    wait_takes_value: srun's --wait is a time, sbatch's is a flag.
    """
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
        else:
            name, value = SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            has_value = value
        flag = name in FLAGS or (name == "wait" and not wait_takes_value)
        if flag and not word.startswith("--") and value:
            # Flags may be written together: -lu.
            rest.insert(0, f"-{value}")
        if flag:
            value = "yes"
        elif name in OPTIONAL:
            value = value if has_value else OPTIONAL[name]
        elif name not in VALUES and name != "wait":
            raise SlurmError(f"unrecognized option '{word}'", 255)
        elif not has_value:
            if not rest:
                raise SlurmError(f"option '{word}' requires an argument", 255)
            value = rest.pop(0)
        options[name] = value
    return options, rest


def parse_directives(script: str) -> dict[str, str]:
    """The #SBATCH lines up to the first line of commands; a later one replaces an earlier one."""
    options: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            options |= parse_options(shlex.split(line[len("#SBATCH") :], comments=True))[0]
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return options


def parse_time_limit(text: str) -> float | None:
    """Seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, rounded up to minutes; None without a limit."""
    if text.upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise SlurmError("Invalid --time specification", 255)
    days, first, second, third = (int(group) if group else 0 for group in match.groups())
    if match[1]:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif match[4]:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) * 60.0


def parse_count(options: dict[str, str], name: str) -> int | None:
    """A positive number; of a range such as 2-4, the lower end."""
    text = options.get(name)
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)(?:-\d+)?", text)
    if match is None:
        raise SlurmError(f'Invalid numeric value "{text}" for --{name}.', 255)
    return int(match[1])


class LimitWarning(NamedTuple):
    """--signal: what is sent, how many seconds ahead of the limit, and whether to the batch shell only."""

    number: int
    seconds: float
    batch_only: bool


def parse_warning(text: str) -> LimitWarning:
    """[B:]NAME[@SECONDS], 60 seconds by default."""
    match = re.fullmatch(r"(?:([BR]+):)?(\w+)(?:@(\d+))?", text)
    if match is None:
        raise SlurmError(f"Invalid --signal specification: {text}", 255)
    return LimitWarning(parse_signal(match[2]), float(match[3] or 60), "B" in (match[1] or ""))


def parse_signal(text: str) -> int:
    """USR2, SIGUSR2 or 12."""
    if text.isdigit():
        return int(text)
    try:
        return signal.Signals["SIG" + text.upper().removeprefix("SIG")].value
    except KeyError:
        raise SlurmError(f"Unknown job signal: {text}") from None


def spread_tasks(tasks: int, nodes: int) -> list[int]:
    """Tasks of each node, as even as possible, the larger numbers first."""
    share, extra = divmod(tasks, nodes)
    return [share + (node < extra) for node in range(nodes)]
