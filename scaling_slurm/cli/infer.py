"""`scaling infer`: continues text with what was trained. Text goes to stdout, everything else to stderr."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaling_slurm.cli import options
from scaling_slurm.errors import ConfigError

if TYPE_CHECKING:
    from scaling_slurm.transformer.infer import LanguageModel
    from scaling_slurm.transformer.inference.sampling import SamplingConfig

PRECISIONS = ("float32", "bfloat16", "float64")


def _check_share(top_p: float) -> float:
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p {top_p}", "above 0 and at most 1 (off)", "--top-p")
    return top_p


def _check_precision(name: str | None) -> str | None:
    if name is not None and name not in PRECISIONS:
        raise ConfigError(f"precision {name!r}", f"one of {', '.join(PRECISIONS)}", "--precision")
    return name


def infer(
    run: Annotated[str, typer.Argument(help="Run, its directory, a job id, or a checkpoint's directory.")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue. Without it, or with -, stdin; at a terminal each line is a prompt."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(callback=_check_share, help="Choose among the likeliest tokens that together reach p; 1: all."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            callback=_check_precision, help=f"{', '.join(PRECISIONS[:2])} or {PRECISIONS[2]}; by default as trained."
        ),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Another tokenizer.json than the run's.")] = None,
    runs: options.Runs = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line for each prompt instead of text.")] = False,
) -> None:
    """Generate text from a run's newest checkpoint."""
    interactive = prompt is None and sys.stdin.isatty()
    if not interactive:
        prompt = _checked(prompt if prompt not in (None, "-") else _read_stdin())
    if temperature == 0 and (top_k > 0 or top_p < 1):
        typer.echo("--top-k and --top-p change nothing at temperature 0: set --temperature too", err=True)

    from scaling_slurm.launch.runs import find_run

    path = Path(run) if _means_checkpoint(run) else find_run(run, runs and runs.absolute()).path

    from scaling_slurm.transformer.infer import load_model
    from scaling_slurm.transformer.inference.sampling import SamplingConfig

    sampling = SamplingConfig(temperature, top_k, top_p, seed)
    model = load_model(path, device=device, precision=precision, tokenizer=tokenizer)
    if prompt is not None:
        _answer(model, prompt, max_tokens, sampling, json)
    else:
        _converse(model, max_tokens, sampling, json)


def _means_checkpoint(text: str) -> bool:
    """Whether it names a checkpoint, a run's folder of them, or something in there that is missing."""
    from scaling_slurm.run_directory import RunDirectory

    path = Path(os.path.abspath(text))
    if (path / "manifest.json").is_file():
        return True
    if (os.sep not in text and not path.exists()) or RunDirectory(path).config_file.is_file():
        return False
    runs = (RunDirectory(folder.parent) for folder in (path, path.parent) if folder.name == "checkpoints")
    return any(run.config_file.is_file() for run in runs)


def _read_stdin() -> str:
    """All of stdin, without the newline that `echo` puts at the end."""
    return sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape").removesuffix("\n")


def _checked(prompt: str | None) -> str:
    try:
        (prompt or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8: {error.reason} at character {error.start}") from None
    return prompt or ""


def _answer(model: "LanguageModel", prompt: str, max_tokens: int, sampling: "SamplingConfig", json: bool) -> None:
    """Print the continuation of a prompt as it comes."""
    completion = model.complete(prompt, max_tokens=max_tokens, sampling=sampling)
    if json:
        text = "".join(completion)
        record = {"prompt": prompt, "text": text, "tokens": completion.num_tokens, "step": model.checkpoint.step}
        typer.echo(json_module.dumps(record | {"finish_reason": completion.finish_reason}))
        return
    for piece in completion:
        typer.echo(piece.encode(), nl=False)  # bytes, so that no locale can refuse a character
    typer.echo()
    if completion.finish_reason == "context":
        typer.echo(f"the context of {model.engine.config.sequence_length} tokens is full", err=True)


def _converse(model: "LanguageModel", max_tokens: int, sampling: "SamplingConfig", json: bool) -> None:
    """Answer line by line; each is a prompt of its own."""
    from scaling_slurm.errors import ScalingError

    typer.echo(f"step {model.checkpoint.step}. Ctrl-C stops a text, Ctrl-D ends.", err=True)
    while True:
        try:
            typer.echo("> ", nl=False, err=True)
            line = sys.stdin.readline()
            if not line:
                break
            if prompt := line.removesuffix("\n"):
                _answer(model, _checked(prompt), max_tokens, sampling, json)
        except KeyboardInterrupt:
            typer.echo(err=True)
        except ScalingError as error:
            typer.echo(f"error: {error}", err=True)
    typer.echo(err=True)
