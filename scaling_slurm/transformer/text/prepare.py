"""Makes token files from text: tokenises the documents as they come, then deals them out in an order keyed by a seed.

The same documents, tokenizer and seed give the same bytes, whatever the place, the listing order and the threads.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from scaling_slurm.core.data.order import order_key, permute_many
from scaling_slurm.core.data.token_file import TokenFile, TokenFileWriter, choose_dtype
from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.text.documents import Corpus
from scaling_slurm.transformer.text.tokenizer import Tokenizer

FORMAT_VERSION = 1
RECORD = "data.json"
"""Written last: a folder that has it is complete."""
OUTPUTS = (RECORD, "train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.json")
_BATCH_CHARACTERS = 1 << 21
_PIECE_CHARACTERS = 1 << 16
_CUT = re.compile(r"(?<=\S)\n(?=\S)")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Split:
    """One token file."""

    documents: int
    tokens: int
    largest_token_id: int


@dataclass(frozen=True)
class Prepared:
    """What was written."""

    directory: Path
    vocab_size: int
    bytes: int
    """Of UTF-8 text."""
    files: dict[str, Split]
    """"train", and "validation" unless there is none."""

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.files.values())

    @property
    def tokens(self) -> int:
        """Ends of documents included."""
        return sum(split.tokens for split in self.files.values())


def prepare(
    corpus: Corpus,
    out: Path,
    *,
    train_tokenizer: int | None = None,
    tokenizer: Path | None = None,
    validation: float = 0.01,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = lambda message: None,
) -> Prepared:
    """Write train and validation token files, tokenizer.json and data.json to `out`.

    Either a new tokenizer of `train_tokenizer` ids is trained on all documents, or `tokenizer` names a tokenizer.json.
    `validation` is the share of the documents that are held out: at least one, if there are two. Until all is done,
    `out` holds nothing but a temporary folder, which an error or an interrupt removes.
    """
    if (train_tokenizer is None) == (tokenizer is None):
        raise ConfigError("one tokenizer is needed", "give either --train-tokenizer SIZE or --tokenizer FILE")
    if not 0 <= validation < 1:
        raise ConfigError(f"a validation share of {validation} is impossible", "from 0 to below 1", "--validation")
    _refuse_existing(out, overwrite)
    with _working_folder(out) as work:
        if tokenizer is not None:
            words = Tokenizer.load(tokenizer)
            shutil.copyfile(tokenizer, work / "tokenizer.json")
        else:
            assert train_tokenizer is not None
            progress("training the tokenizer")
            words = Tokenizer.train((piece for text in corpus.texts() for piece in _pieces(text)), train_tokenizer)
            words.save(work / "tokenizer.json")
        num_bytes = _tokenize(corpus, words, work / "unshuffled", progress)
        files = _deal_out(TokenFile(work / "unshuffled"), work, validation, seed, progress)
        prepared = Prepared(out, words.vocab_size, num_bytes, files)
        (work / RECORD).write_text(json.dumps(_record(prepared, words, corpus, seed, work), indent=2) + "\n")
        _publish(work, out)
    return prepared


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file", "a folder is needed", "name another one with --out")
    if not overwrite and out.is_dir() and any(not entry.name.startswith(".prepare-") for entry in out.iterdir()):
        raise ConfigError(
            f"{out} is not empty", "name a new folder with --out", "--overwrite replaces the files of an earlier run"
        )


@contextmanager
def _working_folder(out: Path) -> Iterator[Path]:
    """A folder inside `out`, so on the same file system; gone afterwards, and `out` too if it was new and is empty."""
    is_new = not out.exists()
    work = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".prepare-", dir=out))
        yield work
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}", where="--out") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _tokenize(corpus: Corpus, tokenizer: Tokenizer, prefix: Path, progress: Progress) -> int:
    """Write all documents in the order of the corpus; returns the bytes of their text."""
    num_bytes, parts = 0, []
    end = np.array([tokenizer.end_of_document_id], dtype=np.int32)
    with TokenFileWriter(prefix, choose_dtype(tokenizer.vocab_size - 1)) as writer:
        for batch in _batches(corpus, whole=not tokenizer.cuts_at_lines()):
            for (piece, is_last), ids in zip(batch, tokenizer.encode_batch([piece for piece, _ in batch]), strict=True):
                num_bytes += len(piece.encode())
                parts.append(np.array(ids, dtype=np.int32))
                if is_last:
                    writer.add_document(np.concatenate([*parts, end]))
                    parts = []
            progress(f"{writer.num_documents:,} documents, {writer.num_tokens:,} tokens")
    if writer.num_documents == 0:
        raise ConfigError(
            f"there is no text in {len(corpus.sources)} files "
            f"({corpus.num_undecodable} are not UTF-8, {corpus.num_empty} documents are empty)",
            "name files with text, or other suffixes",
        )
    return num_bytes


def _batches(corpus: Corpus, whole: bool) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether it ends its document), a few megabytes at a time."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in corpus.texts():
        pieces = [text] if whole else _pieces(text)
        for number, piece in enumerate(pieces, start=1):
            batch.append((piece, number == len(pieces)))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> list[str]:
    """A long text in pieces, for little memory and all threads, cut where Tokenizer.cuts_at_lines says it is exact."""
    pieces, start = [], 0
    while len(text) - start > _PIECE_CHARACTERS and (cut := _CUT.search(text, start + _PIECE_CHARACTERS)):
        pieces.append(text[start : cut.end()])
        start = cut.end()
    return [*pieces, text[start:]]


def _deal_out(source: TokenFile, work: Path, validation: float, seed: int, progress: Progress) -> dict[str, Split]:
    """Documents in the permutation of the seed: the first ones for validation, the others for training."""
    count, key = source.num_documents, order_key("documents", seed)
    held_out = min(max(1, round(count * validation)), count - 1) if validation else 0
    files = {}
    for name, places in (("validation", range(held_out)), ("train", range(held_out, count))):
        if not places:
            continue
        with TokenFileWriter(work / name, source.dtype) as writer:
            for first in range(places.start, places.stop, 1 << 16):
                chunk = np.arange(first, min(first + (1 << 16), places.stop), dtype=np.int64)
                for document in permute_many(chunk, count, key).tolist():
                    writer.add_document(source.document(document))
                progress(f"shuffled {first + len(chunk):,} of {count:,} documents")
        files[name] = Split(writer.num_documents, writer.num_tokens, writer.largest_token)
    return files


def _record(prepared: Prepared, tokenizer: Tokenizer, corpus: Corpus, seed: int, work: Path) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "vocab_size": prepared.vocab_size,
        "largest_token_id": max(split.largest_token_id for split in prepared.files.values()),
        "end_of_document": tokenizer.end_of_document,
        "end_of_document_id": tokenizer.end_of_document_id,
        "documents": prepared.documents,
        "tokens": prepared.tokens,
        "bytes": prepared.bytes,
        "files": {name: vars(split) for name, split in sorted(prepared.files.items())},
        "seed": seed,
        "sources": len(corpus.sources),
        "sources_not_utf8": corpus.num_undecodable,
        "empty_documents": corpus.num_empty,
        "tokenizer_xxh3": xxhash.xxh3_128_hexdigest((work / "tokenizer.json").read_bytes()),
    }


def _publish(work: Path, out: Path) -> None:
    """Replace what `out` had of these files by what `work` has: the record goes first and comes last."""
    for name in OUTPUTS:
        (out / name).unlink(missing_ok=True)
    for name in reversed(OUTPUTS):
        if (work / name).exists():
            os.replace(work / name, out / name)
