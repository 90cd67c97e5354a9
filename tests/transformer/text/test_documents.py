"""Which documents a corpus has and in which order, from folders and from plain and compressed JSON lines."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.text.documents import Corpus


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*texts: str, key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in texts)


def names(corpus: Corpus, root: Path) -> list[str]:
    return [source.path.relative_to(root).as_posix() for source in corpus.sources]


def test_folders_are_walked_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/b/c.py", "a.py", "B.txt"):
        write(tmp_path / name, name)
    write(tmp_path / ".git" / "config")
    write(tmp_path / "a" / ".hidden.py")
    assert names(Corpus([tmp_path]), tmp_path) == ["B.txt", "a.py", "a/b/c.py", "a/z.py", "b.py"]
    assert list(Corpus([tmp_path]).texts()) == ["B.txt", "a.py", "a/b/c.py", "a/z.py", "b.py"]


def test_inputs_keep_their_order_and_a_file_counts_once(tmp_path: Path) -> None:
    for name in ("x/1", "x/2", "y/3"):
        write(tmp_path / name)
    (tmp_path / "y" / "link").symlink_to(tmp_path / "x" / "1")
    corpus = Corpus([tmp_path / "y", tmp_path / "x" / "2", tmp_path / "x"])
    assert names(corpus, tmp_path) == ["y/3", "y/link", "x/2"]


def test_suffixes_and_patterns(tmp_path: Path) -> None:
    for name in ("a.py", "a.pyc", "b.md", "test/c.py", "lib/test/d.py", "lib/e.py"):
        write(tmp_path / name)
    assert names(Corpus([tmp_path], suffixes=[".py", ".md"], exclude=["test"]), tmp_path) == [
        "a.py",
        "b.md",
        "lib/e.py",
    ]
    assert names(Corpus([tmp_path], exclude=["lib/test", "*.pyc", "b.*"]), tmp_path) == [
        "a.py",
        "lib/e.py",
        "test/c.py",
    ]
    assert names(Corpus([tmp_path / "b.md"], suffixes=[".py"]), tmp_path) == ["b.md"]  # named by the user


def test_the_folder_that_is_written_to_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    write(tmp_path / "data" / "tokenizer.json")
    assert names(Corpus([tmp_path], outside=tmp_path / "data"), tmp_path) == ["a.txt"]


def test_missing_inputs_and_folders_without_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*/absent"):
        Corpus([tmp_path / "absent"])
    write(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"there are no files that end in \.py or \.md in "):
        Corpus([tmp_path], suffixes=[".py", ".md"])


def test_files_that_are_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "bad.txt", b"gr\xf6sser")
    write(tmp_path / "good.txt", "größer")
    write(tmp_path / "none.txt", "")
    corpus = Corpus([tmp_path])
    for _ in range(2):
        assert list(corpus.texts()) == ["größer"]
        assert (corpus.num_undecodable, corpus.num_empty) == (1, 1)
    with pytest.raises(ConfigError, match=r"bad\.txt is not UTF-8 text: byte 0xf6 at 2"):
        list(Corpus([tmp_path / "bad.txt"]).texts())


def test_text_is_kept_to_the_byte(tmp_path: Path) -> None:
    text = "\ufeffa\r\nb\rc\n\n\x00"
    assert list(Corpus([write(tmp_path / "a.txt", text)]).texts()) == [text]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    content = lines("one", "", "zwei\nZeilen") + b"\n" + b'{"text": "half \\ud83d of"}'
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix](content)
    corpus = Corpus([write(tmp_path / f"a.jsonl{suffix}", packed)])
    assert list(corpus.texts()) == ["one", "zwei\nZeilen", "half \ufffd of"]
    assert corpus.num_empty == 1


def test_json_lines_under_another_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines("one", "two", key="content"))
    assert list(Corpus([path], key="content").texts()) == ["one", "two"]
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:1 has no text under 'text', only id, content; name the key; --key"
    ):
        list(Corpus([path]).texts())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b"[1]", "no object but"),
        (b'{"text": 5}', "has no text under 'text', int there"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "a.jsonl", lines("one", "two") + line + b"\n" + lines("four"))
    with pytest.raises(ConfigError, match=rf"a\.jsonl:3 .*{message}"):
        list(Corpus([path]).texts())


def test_zstd_files_of_several_frames(tmp_path: Path) -> None:
    """Lines may cross frames; a plain reader stops after the first frame."""
    content = lines(*(f"text {n}" for n in range(50_000)))
    parts = [content[:1000], content[1000:1_500_000], b"", content[1_500_000:]]
    packed = b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)
    texts = list(Corpus([write(tmp_path / "a.jsonl.zst", packed)]).texts())
    assert texts == [f"text {n}" for n in range(50_000)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "no header"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, suffix: str, damage: str) -> None:
    content = lines(*(f"text {n}" for n in range(50_000)))
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix](content)
    packed = packed[:-40] if damage == "cut" else b"plain" + packed
    with pytest.raises(ConfigError, match=r"a\.jsonl\.\w+ cannot be decompressed"):
        list(Corpus([write(tmp_path / f"a.jsonl{suffix}", packed)]).texts())
