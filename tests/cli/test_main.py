"""How `scaling` starts and ends: help without heavy imports, exit codes, one line for an error."""

import os
import signal
import subprocess
import sys

import pytest
import typer

from scaling_slurm import __version__
from scaling_slurm.cli import main as cli
from scaling_slurm.errors import ConfigError, RefusedError

START = "from scaling_slurm.cli.main import main; main()"
HEAVY = {"torch", "numpy", "pydantic", "yaml", "jinja2", "submitit", "tokenizers", "safetensors", "rich"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs main() with an app of one verb that raises the given error; returns exit code, stdout, stderr."""

    def run_main(error: BaseException | None, *arguments: str) -> tuple[int, str, str]:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def verb() -> None:
            typer.echo("started")
            if error:
                raise error

        monkeypatch.setattr(cli, "app", app)
        monkeypatch.setattr(sys, "argv", ["scaling", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run_main


def test_success(run) -> None:
    assert run(None) == (0, "started\n", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a is 1", "it should be 2", "run.yaml:3"), 2, "error: a is 1; it should be 2; run.yaml:3\n"),
        (ConfigError("a is 1\nb is 2"), 2, "error: a is 1\nerror: b is 2\n"),
        (RefusedError("the run is live"), 8, "error: the run is live\n"),
        (ValueError("bad"), 1, "error: ValueError: bad; --debug shows the traceback\n"),
        (typer.Exit(7), 7, ""),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_errors_are_one_line_with_their_exit_code(run, error: BaseException, code: int, line: str | None) -> None:
    ended, _, stderr = run(error)
    assert ended == code
    assert "Traceback" not in stderr
    assert line is None or stderr == line


@pytest.mark.parametrize("error", [ConfigError("wrong"), ValueError("wrong")])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(run, error: Exception) -> None:
    code, _, stderr = run(error, "--debug")
    assert code == run(error)[0]
    assert stderr.startswith("Traceback")
    assert "in verb" in stderr


def test_debug_by_environment(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALING_DEBUG", "0")
    assert "Traceback" not in run(ValueError("wrong"))[2]
    monkeypatch.setenv("SCALING_DEBUG", "1")
    assert "Traceback" in run(ValueError("wrong"))[2]


def test_usage_errors_exit_with_2(run) -> None:
    code, _, stderr = run(None, "--no-such-option")
    assert code == 2
    assert "--no-such-option" in stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", flag])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "\n  config " in capsys.readouterr().out


def test_help_cuts_no_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["scaling", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().out
    assert "\n  clusters  List" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == f"scaling {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    script = f"""
import sys
sys.argv = ["scaling", "--help"]
try:
    {START}
finally:
    print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"


def start(body: str) -> subprocess.Popen[str]:
    """A process in which main() runs an app of one verb with this body."""
    script = (
        "import time, typer; from scaling_slurm.cli import main as cli; app = typer.Typer()\n"
        f"@app.command()\ndef verb() -> None: {body}\n"
        "cli.app = app; cli.main()"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("body", ["print('x')", "print('x' * 1_000_000)", "print('x'); raise SystemExit(7)"])
def test_a_reader_that_leaves_is_no_error_message(body: str) -> None:
    """As in `scaling config schema run | head -1`, with less and more than a pipe holds."""
    process = start(body)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


def test_interrupted_while_it_works() -> None:
    process = start("print('ready', flush=True); time.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
