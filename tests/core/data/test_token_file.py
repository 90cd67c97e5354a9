"""Megatron-LM's format, checked against a second reader that is written here from the facts of the format."""

import struct
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from scaling_slurm.core.data.token_file import TokenFile, TokenFileWriter, choose_dtype
from scaling_slurm.errors import ConfigError

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
DOCUMENTS = [[5, 6, 7], [], [65535], list(range(100))]


def read_independently(prefix: Path) -> tuple[str, list[list[int]]]:
    """(struct letter of the type, documents), field by field."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    letter, position = CODES[code], 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{num_sequences}i", index, position)
    position += 4 * num_sequences
    pointers = struct.unpack_from(f"<{num_sequences}q", index, position)
    position += 8 * num_sequences
    boundaries = struct.unpack_from(f"<{num_boundaries}q", index, position)
    assert len(index) == position + 8 * num_boundaries
    sequences = [list(struct.unpack_from(f"<{n}{letter}", tokens, at)) for n, at in zip(lengths, pointers, strict=True)]
    return letter, [list(chain(*sequences[a:b])) for a, b in pairwise(boundaries)]


def write(prefix: Path, documents: Iterable[list[int]], dtype: type = np.uint16, overwrite: bool = False) -> None:
    with TokenFileWriter(prefix, dtype, overwrite=overwrite) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize(("dtype", "letter"), [(np.uint16, "H"), (np.int32, "i")])
def test_what_is_written_is_read_by_both_readers(tmp_path: Path, dtype: type, letter: str) -> None:
    prefix = tmp_path / "with.dots.in.it"
    write(prefix, DOCUMENTS, dtype)
    assert read_independently(prefix) == (letter, DOCUMENTS)
    file = TokenFile(prefix)
    assert (file.num_documents, file.num_tokens, file.dtype) == (4, 104, np.dtype(dtype))
    assert [file.document(index).tolist() for index in range(4)] == DOCUMENTS
    assert file.tokens(2, 6).tolist() == [7, 65535, 0, 1]
    assert file.tokens(104, 104).tolist() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{prefix.name}.bin", f"{prefix.name}.idx"]


@pytest.mark.parametrize("code", sorted(CODES))
def test_reads_every_integer_type_and_documents_of_several_sequences(tmp_path: Path, code: int) -> None:
    letter, size = CODES[code], struct.calcsize(CODES[code])
    tokens = [1, 2, 3, 4, 5, 100]
    (tmp_path / "x.bin").write_bytes(struct.pack(f"<6{letter}", *tokens))
    (tmp_path / "x.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 3, 3)
        + struct.pack("<3i", 2, 1, 3)
        + struct.pack("<3q", 0, 2 * size, 3 * size)
        + struct.pack("<3q", 0, 2, 3)
    )
    file = TokenFile(tmp_path / "x")
    assert [file.document(0).tolist(), file.document(1).tolist()] == [[1, 2, 3], [4, 5, 100]]
    assert file.tokens(0, 6).tolist() == tokens


def test_indices_out_of_range(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    file = TokenFile(tmp_path / "x")
    for start, stop in ((-1, 3), (3, 2), (0, 105)):
        with pytest.raises(IndexError):
            file.tokens(start, stop)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            file.document(index)


def test_no_documents_at_all(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    assert (TokenFile(tmp_path / "x").num_documents, TokenFile(tmp_path / "x").num_tokens) == (0, 0)


@pytest.mark.parametrize("largest", [0, 65499, 65535])
def test_small_vocabularies_take_two_bytes(largest: int) -> None:
    assert choose_dtype(largest) is np.uint16


def test_larger_vocabularies_take_four_bytes() -> None:
    assert choose_dtype(65536) is choose_dtype(2**31 - 1) is np.int32
    with pytest.raises(ConfigError, match="2147483648"):
        choose_dtype(2**31)


@pytest.mark.parametrize("ids", [[1, 65536], [-1], np.array([2**40])])
def test_an_id_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not fit uint16"):
        write(tmp_path / "x", [[1, 2], ids])
    assert list(tmp_path.iterdir()) == []


def test_does_not_overwrite_unless_told(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    with pytest.raises(ConfigError, match=r"x\.bin exists already"):
        TokenFileWriter(tmp_path / "x", np.uint16)
    write(tmp_path / "x", [[2, 3]], np.int32, overwrite=True)
    assert read_independently(tmp_path / "x") == ("i", [[2, 3]])


def test_a_failed_overwrite_keeps_the_old_files(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])

    def interrupted() -> Iterator[list[int]]:
        yield [2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", interrupted(), overwrite=True)
    assert read_independently(tmp_path / "x") == ("H", [[1]])
    assert len(list(tmp_path.iterdir())) == 2


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nothing\.bin"):
        TokenFile(tmp_path / "nothing")


def test_a_truncated_bin_names_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"has 206 bytes.*describes 208"):
        TokenFile(tmp_path / "x")


def test_a_bin_that_shrinks_later_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    file = TokenFile(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(b"ab")
    with pytest.raises(ConfigError, match="has become shorter"):
        file.tokens(0, 50)


@pytest.mark.parametrize(
    ("keep", "message"), [(5, "is not an index"), (60, r"has 60 bytes.*asks for 122"), (121, "has 121 bytes")]
)
def test_a_truncated_index_is_refused(tmp_path: Path, keep: int, message: str) -> None:
    write(tmp_path / "x", DOCUMENTS)
    content = (tmp_path / "x.idx").read_bytes()
    assert len(content) == 122
    (tmp_path / "x.idx").write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=message):
        TokenFile(tmp_path / "x")


@pytest.mark.parametrize(("version", "code"), [(2, 8), (1, 6), (1, 9)])
def test_unknown_versions_and_float_types_are_refused(tmp_path: Path, version: int, code: int) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "x.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, 0, 1) + bytes(8))
    with pytest.raises(ConfigError, match=f"version {version} and type code {code}"):
        TokenFile(tmp_path / "x")
