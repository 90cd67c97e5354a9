"""`scaling prepare`: text to token files."""

from pathlib import Path
from typing import Annotated

import typer


def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT",
            help="Files and folders. A file is a document; .jsonl, .jsonl.gz and .jsonl.zst have one a line.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    train_tokenizer: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Train a byte-level BPE tokenizer with so many ids.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json.")] = None,
    validation: Annotated[float, typer.Option(help="Share of the documents to hold out; 0 for none.")] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Each seed puts the documents into another order.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; by default one for each core.")] = None,
    suffix: Annotated[
        list[str] | None,
        typer.Option(help="Take only files from folders whose names end so, as .py. Can be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Leave out names or relative paths in folders. Can be repeated."),
    ] = None,
    key: Annotated[str, typer.Option(help="Where a JSON line has its text.")] = "text",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")] = False,
) -> None:
    """Turn text into shuffled token files for training.

    The files are in Megatron-LM's indexed format. In folders, hidden files and files that are not UTF-8 are left out.
    """
    import os
    import signal
    import sys
    import time

    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read once, when the tokenizer's library first needs threads
    from scaling_slurm.transformer.text.documents import Corpus
    from scaling_slurm.transformer.text.prepare import prepare as prepare_corpus

    def show(message: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)

    began = time.monotonic()
    # A scheduler's SIGTERM cleans up as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        corpus = Corpus(inputs, suffixes=suffix or (), exclude=exclude or (), key=key, outside=out)
        prepared = prepare_corpus(
            corpus,
            out,
            train_tokenizer=train_tokenizer,
            tokenizer=tokenizer,
            validation=validation,
            seed=seed,
            overwrite=overwrite,
            progress=show,
        )
    finally:
        signal.signal(signal.SIGTERM, previous)
        show("")
    seconds = time.monotonic() - began
    typer.echo(
        f"{out}: {prepared.documents:,} documents, {prepared.tokens:,} tokens of "
        f"{prepared.bytes / prepared.tokens:.2f} bytes in {seconds:.1f} s, {prepared.tokens / seconds:,.0f} tokens/s"
    )
    if left_out := corpus.left_out():
        typer.echo(f"left out: {left_out}")
    if train_tokenizer is not None and prepared.vocab_size < train_tokenizer:
        typer.echo(f"asked for {train_tokenizer:,} ids, the corpus yields {prepared.vocab_size:,}")
    if validation and "validation" not in prepared.files:
        typer.echo("no validation set: one document cannot be split")
    relative = "" if out.is_absolute() else "  # relative to the directory where scaling is called"
    typer.echo(f"\nFor the run file:\ndata:{relative}")
    for name in sorted(prepared.files):
        typer.echo(f"  {name}: {out / name}  # {prepared.files[name].tokens:,} tokens")
    typer.echo(f"model:\n  vocab_size: {prepared.vocab_size}")
