"""`scaling infer`: text on stdout, notes on stderr; at a terminal a conversation."""

import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scaling_slurm.cli import infer as infer_module
from scaling_slurm.cli.infer import infer
from scaling_slurm.cli.main import main
from scaling_slurm.errors import ConfigError, ExitCode, NotFoundError, ScalingError
from scaling_slurm.transformer.infer import PRECISIONS, load_model
from tests.support.language_model import write_run

TEXT = "Zürich grüßt 東京 — naïve 🦊🦊 foxes jump."
REST = " grüßt 東京 — naïve 🦊🦊 foxes jump."


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "small-1", TEXT)
    (root / "small-1" / "jobs.jsonl").write_text('{"job_id": "4711"}\n')
    return root


@pytest.fixture
def invoke(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("SCALING_RUNS", str(root))
    monkeypatch.setenv("SCALING_HOME", str(root / "home"))
    app = typer.Typer()
    app.command()(infer)

    def run(*arguments: str, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)

    return run


def test_text_alone_goes_to_stdout(invoke: Callable[..., Any]) -> None:
    result = invoke("small-1", "Zürich")
    assert result.exit_code == 0
    assert result.stdout_bytes.decode() == REST + "\n"


@pytest.mark.parametrize("name", ["job id", "directory", "checkpoint"])
def test_a_run_has_several_names(invoke: Callable[..., Any], root: Path, name: str) -> None:
    checkpoint = root / "small-1" / "checkpoints" / "step-00000007-attempt-001"
    token = {"job id": "4711", "directory": str(root / "small-1"), "checkpoint": str(checkpoint)}[name]
    assert invoke(token, "Zürich").stdout == REST + "\n"


@pytest.mark.parametrize("arguments", [("-",), ()])
@pytest.mark.parametrize("stdin", ["Zürich", "Zürich\n"])
def test_prompt_through_a_pipe(invoke: Callable[..., Any], arguments: tuple[str, ...], stdin: str) -> None:
    assert invoke("small-1", *arguments, stdin=stdin).stdout == REST + "\n"


@pytest.mark.parametrize(("arguments", "stdin"), [(("",), None), ((), "")])
def test_empty_prompt_begins_a_document(
    invoke: Callable[..., Any], arguments: tuple[str, ...], stdin: str | None
) -> None:
    assert invoke("small-1", *arguments, stdin=stdin).stdout == TEXT + "\n"


def test_json(invoke: Callable[..., Any]) -> None:
    record = json.loads(invoke("small-1", "Zürich", "--json", "--max-tokens", "2").stdout)
    assert record["prompt"] == "Zürich"
    assert REST.startswith(record["text"])
    assert (record["tokens"], record["finish_reason"], record["step"]) == (2, "max_tokens", 7)


def test_options_reach_the_sampler(invoke: Callable[..., Any]) -> None:
    hot = ("small-1", "Zü", "--temperature", "9", "--max-tokens", "12")
    drawn = [invoke(*hot, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = invoke("small-1", "Zü", "--max-tokens", "12").stdout
    assert drawn[0] != greedy
    assert invoke(*hot, "--top-k", "1").stdout == greedy
    assert invoke(*hot, "--top-p", "0.00001").stdout == greedy


def test_a_full_context_is_noted_on_stderr(invoke: Callable[..., Any]) -> None:
    hot = ("small-1", "Zü", "--temperature", "9", "--max-tokens", "1000", "--seed")
    ends = (json.loads(invoke(*hot, str(seed), "--json").stdout)["finish_reason"] for seed in range(20))
    seed = list(ends).index("context")  # others happen upon the end of a document
    result = invoke(*hot, str(seed))
    assert "the context of" in result.stderr
    assert "is full" in result.stderr
    assert "is full" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        (("4712", "x"), NotFoundError, ExitCode.NOT_FOUND),
        (("small-2", "x"), NotFoundError, ExitCode.NOT_FOUND),
        (("./small-2", "x"), NotFoundError, ExitCode.NOT_FOUND),
        (("small-1", "Zürich " * 100), ConfigError, ExitCode.CONFIG),
        (("small-1", "x", "--temperature", "inf"), ConfigError, ExitCode.CONFIG),
        (("small-1", "x\udcff"), ConfigError, ExitCode.CONFIG),
    ],
)
def test_mistakes(
    invoke: Callable[..., Any], arguments: tuple[str, ...], error: type[ScalingError], code: ExitCode
) -> None:
    with pytest.raises(error) as caught:
        invoke(*arguments)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--temperature", "-0.1", "0"),
        ("--top-k", "-1", "0"),
        ("--top-p", "0", "above 0"),
        ("--top-p", "1.1", "at most 1"),
        ("--precision", "half", "float32, bfloat16, float64"),
        ("--max-tokens", "0", "1"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str, says: str
) -> None:
    monkeypatch.setattr(infer_module, "_means_checkpoint", lambda text: pytest.fail("it has gone on"))
    monkeypatch.setattr(sys, "argv", ["scaling", "infer", "nowhere", "x", option, value])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.CONFIG
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert option in line
    assert says in line


def test_the_precisions_are_those_that_can_be_loaded() -> None:
    assert tuple(PRECISIONS) == infer_module.PRECISIONS


@pytest.mark.parametrize("choice", [("--top-k", "2"), ("--top-p", "0.5")])
def test_a_choice_without_temperature_is_said_to_change_nothing(
    invoke: Callable[..., Any], choice: tuple[str, str]
) -> None:
    result = invoke("small-1", "Zürich", *choice)
    assert result.stdout == REST + "\n"
    [line] = result.stderr.splitlines()
    assert "at temperature 0" in line
    assert "temperature" not in invoke("small-1", "Zürich", *choice, "--temperature", "0.1").stderr


@pytest.mark.parametrize("name", ["checkpoints/", "checkpoints", "checkpoints/latest"])
def test_the_folder_of_checkpoints_is_the_newest_one(invoke: Callable[..., Any], root: Path, name: str) -> None:
    assert invoke(f"{root}/small-1/{name}", "Zürich").stdout == REST + "\n"


@pytest.mark.parametrize("inside", [False, True])
def test_a_mistyped_checkpoint_names_those_that_are_there(
    invoke: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    folder = root / "small-1" / "checkpoints"
    monkeypatch.chdir(folder if inside else root)
    with pytest.raises(NotFoundError) as caught:
        invoke(f"{'.' if inside else 'small-1/checkpoints'}/step-00000999-attempt-001", "x")
    assert str(caught.value) == (
        f"no such checkpoint: step-00000999-attempt-001; there are step-00000007-attempt-001; in {folder}"
    )


def test_a_prompt_that_is_not_utf8_is_refused(invoke: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        invoke("small-1", stdin=b"caf\xe9")


def test_interrupt_stops_the_text_and_returns_to_the_prompt(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    model = load_model(root / "small-1")

    def interrupted(prompt: str, **_: Any) -> Iterator[str]:
        yield " grüßt"
        raise KeyboardInterrupt

    def complete(prompt: str, **options: Any) -> Any:
        return interrupted(prompt) if prompt == "stop" else model.complete(prompt, **options)

    stand_in = SimpleNamespace(complete=complete, checkpoint=model.checkpoint, engine=model.engine)
    monkeypatch.setattr("sys.stdin", io.StringIO("stop\n\nZürich " + "Zürich " * 99 + "\nZürich\n"))
    infer_module._converse(stand_in, 100, None, False)  # type: ignore[arg-type]
    out, err = capsysbinary.readouterr()
    assert out.decode() == " grüßt" + REST + "\n"
    assert err.decode().count("error: the prompt has") == 1


def test_a_conversation_at_a_terminal_in_somebody_elses_job(root: Path) -> None:
    """Nothing of the job that the shell runs in matters, and no other rank is waited for."""
    sizes = dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"), "8")
    ranks = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "RANK", "LOCAL_RANK"), "3")
    foreign = sizes | ranks | {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    environment = os.environ | foreign | {"SCALING_RUNS": str(root), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = "import typer; from scaling_slurm.cli.infer import infer; typer.run(infer)"
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, "small-1"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=environment,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(terminal)
    try:
        assert "step 7" in read_until(controller, "> ")
        os.write(controller, "Zürich\n".encode())
        read_until(controller, "> ")
        os.write(controller, b"\x03")  # Ctrl-C
        read_until(controller, "> ")
        os.write(controller, b"\x04")  # Ctrl-D
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        assert process.stdout.read().decode() == REST + "\n"
    finally:
        process.kill()
        os.close(controller)


def own_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(descriptor: int, words: str) -> str:
    text = b""
    while words.encode() not in text:
        assert select.select([descriptor], [], [], 120)[0], f"no {words!r} in {text!r}"
        text += os.read(descriptor, 4096)
    return text.decode(errors="replace")
