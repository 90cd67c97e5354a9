"""The `scaling` command: one line for each verb, and how an error ends. Knows nothing of what the verbs do.

A verb's file imports only typer and the standard library at its top, so that `scaling --help` is quick.
"""

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from scaling_slurm import __version__
from scaling_slurm.cli import cancel, clusters, config, infer, logs, plan, prepare, resume, status, submit, train
from scaling_slurm.errors import ExitCode, ScalingError

_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""click's UsageError, whether typer brings its own click or not."""

app = typer.Typer(
    name="scaling",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scaling {__version__}")
        raise typer.Exit


@app.callback()
def scaling(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also SCALING_DEBUG=1.")
    ] = False,
) -> None:
    """Train and run large language models on Slurm clusters."""


app.command()(prepare.prepare)
app.command()(plan.plan)
app.command()(submit.submit)
app.command()(status.status)
app.command()(logs.logs)
app.command()(cancel.cancel)
app.command()(resume.resume)
app.command()(train.train)
app.command()(infer.infer)
app.command()(clusters.clusters)
app.add_typer(config.app, name="config")


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)


def _report_usage(error: Any) -> None:
    """One line for what cannot be parsed; the help itself where a command was called with nothing."""
    message, verb = error.format_message(), error.ctx.command_path if error.ctx else "scaling"
    if "\n" in message:
        print(message, file=sys.stderr)
    else:
        print(f"error: {message.rstrip('.')}; `{verb} -h` shows what it takes", file=sys.stderr)


def main() -> None:
    """The console script: runs a verb and exits with its code; an error is a line a problem, without traceback."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]  # may stand anywhere
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("SCALING_DEBUG", "0") not in ("", "0")
    try:
        ended = app(args=arguments, prog_name="scaling", standalone_mode=False)
        code: int | str | None = ended if isinstance(ended, int) else ExitCode.OK
    except SystemExit as end:
        code = end.code
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except _USAGE_ERROR as error:
        _report_usage(error)
        code = ExitCode.CONFIG
    except ScalingError as error:
        _report(str(error), debug)
        code = error.exit_code
    except Exception as error:
        _report(f"{type(error).__name__}: {error}; --debug shows the traceback", debug)
        code = ExitCode.UNEXPECTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, like `| head`; python would complain once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
