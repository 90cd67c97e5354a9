"""What `prepare` writes for small corpora: exact contents, reproducible bytes, and nothing after a failure."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from scaling_slurm.core.data.dataset import TokenDataset
from scaling_slurm.core.data.token_file import TokenFile
from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.text import prepare as module
from scaling_slurm.transformer.text.documents import Corpus
from scaling_slurm.transformer.text.prepare import Prepared, prepare
from scaling_slurm.transformer.text.tokenizer import Tokenizer

TEXTS = [f"document {n}: " + "größer 数字 🙂\n" * (n % 7 + 1) for n in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(text)
    return tmp_path / "in"


def run(folder: Path, out: Path, **changes: object) -> Prepared:
    arguments = {"train_tokenizer": 300, "validation": 0.1} | changes
    return prepare(Corpus([folder]), out, **arguments)  # type: ignore[arg-type]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def decoded(out: Path, name: str) -> list[str]:
    file, tokenizer = TokenFile(out / name), Tokenizer.load(out / "tokenizer.json")
    documents = [file.document(index).tolist() for index in range(file.num_documents)]
    assert all(document.index(tokenizer.end_of_document_id) == len(document) - 1 for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def test_every_document_comes_back_exactly_once(folder: Path, tmp_path: Path) -> None:
    prepared = run(folder, tmp_path / "out")
    train, validation = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert (len(train), len(validation)) == (54, 6)
    assert train != sorted(train)
    assert (prepared.documents, prepared.bytes) == (60, sum(len(text.encode()) for text in TEXTS))


def test_the_record(folder: Path, tmp_path: Path) -> None:
    (folder / "bad.txt").write_bytes(b"\xff")
    (folder / "empty.txt").write_bytes(b"")
    prepared = run(folder, tmp_path / "out", seed=4)
    record = json.loads((tmp_path / "out" / "data.json").read_text())
    train, validation = TokenFile(tmp_path / "out" / "train"), TokenFile(tmp_path / "out" / "validation")
    largest = [int(file.tokens(0, file.num_tokens).max()) for file in (train, validation)]
    assert record == {
        "format_version": 1,
        "vocab_size": 300,
        "largest_token_id": max(largest),
        "end_of_document": "<|endoftext|>",
        "end_of_document_id": 0,
        "documents": 60,
        "tokens": train.num_tokens + validation.num_tokens,
        "bytes": prepared.bytes,
        "files": {
            "train": {"documents": 54, "tokens": train.num_tokens, "largest_token_id": largest[0]},
            "validation": {"documents": 6, "tokens": validation.num_tokens, "largest_token_id": largest[1]},
        },
        "seed": 4,
        "sources": 62,
        "sources_not_utf8": 1,
        "empty_documents": 1,
        "tokenizer_xxh3": xxhash.xxh3_128((tmp_path / "out" / "tokenizer.json").read_bytes()).hexdigest(),
    }
    assert TokenDataset(tmp_path / "out" / "train", 8, seed=0).largest_token() == largest[0]


def test_same_bytes_from_another_place_written_in_another_order(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out")
    other = tmp_path / "elsewhere" / "copy"
    other.mkdir(parents=True)
    for path in sorted(folder.iterdir(), reverse=True):
        shutil.copy(path, other / path.name)
    run(other, tmp_path / "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    run(folder, tmp_path / "seeded", seed=1)
    assert contents(tmp_path / "seeded")["train.bin"] != contents(tmp_path / "out")["train.bin"]
    assert contents(tmp_path / "seeded")["tokenizer.json"] == contents(tmp_path / "out")["tokenizer.json"]


def test_bytes_do_not_depend_on_the_size_of_batches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "long.txt").write_text("".join(f"line {n}:\nvalue\n\n  'more'\n" for n in range(300)))
    run(folder, tmp_path / "out")
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 40)
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 16)
    run(folder, tmp_path / "small")
    assert contents(tmp_path / "out") == contents(tmp_path / "small")


def test_long_texts_are_cut_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 10)
    for text in ("", "no line in it at all", "a\nb\n" * 30, "a \n b\n\nc" * 20, "\n" * 50, "x" * 10 + "\n" + "y" * 10):
        pieces = module._pieces(text)
        assert "".join(pieces) == text
        assert all(left[-1] == "\n" and left[-2].strip() and right[0].strip() for left, right in pairwise(pieces))
    assert module._pieces("x" * 10 + "\n" + "y" * 10) == ["x" * 10 + "\n", "y" * 10]


def test_an_existing_tokenizer_is_copied_as_it_is(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "first")
    indented = json.dumps(json.loads((tmp_path / "first" / "tokenizer.json").read_text()), indent=7)
    (tmp_path / "own.json").write_text(indented)
    run(folder, tmp_path / "second", train_tokenizer=None, tokenizer=tmp_path / "own.json")
    assert (tmp_path / "second" / "tokenizer.json").read_text() == indented
    assert contents(tmp_path / "second")["train.bin"] == contents(tmp_path / "first")["train.bin"]


def test_ids_beyond_two_bytes_are_kept(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "first")
    content = json.loads((tmp_path / "first" / "tokenizer.json").read_text())
    content["added_tokens"][0]["id"] = content["model"]["vocab"]["<|endoftext|>"] = 70_000
    (tmp_path / "own.json").write_text(json.dumps(content))
    prepared = run(folder, tmp_path / "second", train_tokenizer=None, tokenizer=tmp_path / "own.json")
    file = TokenFile(tmp_path / "second" / "train")
    assert (prepared.vocab_size, file.dtype) == (70_001, np.int32)
    assert file.document(0)[-1] == 70_000


@pytest.mark.parametrize(
    ("documents", "validation", "held_out"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.5, 5), (60, 0.01, 1), (3, 0.99, 2)]
)
def test_both_sets_have_a_document(tmp_path: Path, documents: int, validation: float, held_out: int) -> None:
    for number in range(documents):
        (tmp_path / f"{number}.txt").write_text("some text")
    prepared = run(tmp_path, tmp_path / "out", validation=validation)
    assert {name: split.documents for name, split in prepared.files.items()} == {
        "validation": held_out,
        "train": documents - held_out,
    }


def test_without_validation(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out")
    run(folder, tmp_path / "out", validation=0, overwrite=True)
    assert sorted(contents(tmp_path / "out")) == ["data.json", "tokenizer.json", "train.bin", "train.idx"]
    (tmp_path / "one.txt").write_text("one document")
    assert list(run(tmp_path / "one.txt", tmp_path / "single").files) == ["train"]


def test_an_existing_folder_is_left_alone_unless_told(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out is not empty; name a new folder with --out; --overwrite replaces"):
        run(folder, tmp_path / "out", seed=1)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "notes.txt").write_text("mine")
    run(folder, tmp_path / "out", seed=1, overwrite=True)
    after = contents(tmp_path / "out")
    assert after.pop("notes.txt") == b"mine"
    assert after.keys() == before.keys()
    assert after["train.bin"] != before["train.bin"]


@pytest.mark.parametrize("step", ["training", "tokens", "shuffled"])
def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path, step: str) -> None:
    def interrupt(message: str) -> None:
        if step in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()
    run(folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", seed=1, overwrite=True, progress=interrupt)
    assert contents(tmp_path / "out") == before


def test_bad_wishes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="either --train-tokenizer SIZE or --tokenizer FILE"):
        run(folder, out, train_tokenizer=None)
    with pytest.raises(ConfigError, match="either"):
        run(folder, out, tokenizer=tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"validation share of 1\.0"):
        run(folder, out, validation=1.0)
    with pytest.raises(ConfigError, match="vocabulary of 256 is too small"):
        run(folder, out, train_tokenizer=256)
    with pytest.raises(ConfigError, match=r"there is no tokenizer .*x\.json"):
        run(folder, out, train_tokenizer=None, tokenizer=tmp_path / "x.json")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no text in 1 files \(0 are not UTF-8, 1 documents are empty\)"):
        run(tmp_path / "empty.txt", out)
    assert not out.exists()


def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is a file"):
        run(folder, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"below cannot be written: Not a directory"):
        run(folder, tmp_path / "file" / "below")
