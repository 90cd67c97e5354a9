"""Training, exact round trips, ids and streaming, on small tokenizers that are trained or written here."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.text.tokenizer import StreamDecoder, Tokenizer

CORPUS = [f"def function_{n}(value):\n    return value * {n}  # größer, 数字, 🙂\n" for n in range(200)]
TRAINED = Tokenizer.train(CORPUS, 400)


def sentencepiece_like(path: Path, **changes: object) -> Path:
    """A Llama-2 style tokenizer.json: metaspace, byte fallback, unasked-for <s>, truncation and padding."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + n for n, piece in enumerate(["▁", "a", "b", "▁a", "ab", "▁ab"])}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("▁", "a"), ("a", "b"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    path.write_text(json.dumps(json.loads(backend.to_str()) | changes))
    return path


def test_training_gives_exactly_the_vocabulary() -> None:
    assert TRAINED.vocab_size == 400
    assert (TRAINED.end_of_document, TRAINED.end_of_document_id) == ("<|endoftext|>", 0)
    ids = [id for text in CORPUS for id in TRAINED.encode(text)]
    assert max(ids) < 400
    assert len(ids) < sum(len(text.encode()) for text in CORPUS) / 2


def test_training_is_deterministic(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "first.json")
    Tokenizer.train(iter(CORPUS), 400).save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_a_small_corpus_gives_fewer_ids() -> None:
    assert Tokenizer.train(["aab"], 400).vocab_size == 259
    assert Tokenizer.train([], 257).vocab_size == 257


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 256 is too small; at least 257"):
        Tokenizer.train(CORPUS, 256)


def test_save_and_load(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(CORPUS[3]) == TRAINED.encode(CORPUS[3])
    assert (loaded.vocab_size, loaded.end_of_document_id) == (400, 0)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text)) == text
    assert TRAINED.encode_batch([text, "x"]) == [TRAINED.encode(text), TRAINED.encode("x")]


def test_text_is_never_a_special_token() -> None:
    text = "before<|endoftext|>after"
    assert 0 not in TRAINED.encode(text)
    assert 0 not in TRAINED.encode_batch([text])[0]
    assert TRAINED.decode(TRAINED.encode(text)) == text
    assert TRAINED.encode("a", add_end=True) == [*TRAINED.encode("a"), 0]


def test_flags_of_the_file_do_not_change_what_is_encoded(tmp_path: Path) -> None:
    """No <s> unasked, nothing cut at 4, nothing padded to 8; the end is </s>."""
    tokenizer = Tokenizer.load(sentencepiece_like(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab ab ab ab ab ab", add_end=True) == [264] * 6 + [2]
    assert tokenizer.encode_batch(["ab", "ab ab"]) == [[264], [264, 264]]
    assert tokenizer.end_of_document == "</s>"


def test_vocab_size_counts_added_tokens_and_holes(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    extra = {**content["added_tokens"][0], "id": 450, "content": "<|extra|>"}
    content["added_tokens"].append(extra)
    content["model"]["vocab"]["<|extra|>"] = 450
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "tokenizer.json").vocab_size == 451


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no tokenizer .*absent\.json"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    with pytest.raises(
        ConfigError, match=r"broken\.json is not a tokenizer\.json: .*; .*--train-tokenizer SIZE` makes"
    ):
        Tokenizer.load(tmp_path / "broken.json")
    sentencepiece_like(tmp_path / "endless.json", added_tokens=[])
    with pytest.raises(ConfigError, match="has no special token that ends a document"):
        Tokenizer.load(tmp_path / "endless.json")


def test_cutting_at_lines_is_exact_where_it_is_said_to_be(tmp_path: Path) -> None:
    assert TRAINED.cuts_at_lines()
    assert not Tokenizer.load(sentencepiece_like(tmp_path / "tokenizer.json")).cuts_at_lines()
    for left, right in (("value):\n", "return"), ("x\n", "1"), ("(\n", "'s"), ("数\n", "🙂")):
        assert TRAINED.encode(left + right) == TRAINED.encode(left) + TRAINED.encode(right)


def stream(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(id) for id in ids], decoder.flush()


@pytest.mark.parametrize(
    "text", ["plain words", "größer", "数字の漢字", "🙂👩‍👩‍👧‍👦🏳️‍🌈", "a\ufffdb\ufffd", " lead", "\n\t  x"]
)
def test_streaming_never_splits_a_character(text: str) -> None:
    ids = TRAINED.encode(text)
    pieces, rest = stream(TRAINED, ids)
    assert "".join(pieces) + rest == text == TRAINED.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert rest == ""


def test_streaming_holds_back_an_incomplete_character_and_flushes_it() -> None:
    ids = [TRAINED.encode(piece)[0] for piece in "ab"] + TRAINED.encode("𝄞")
    assert len(ids) == 6  # four bytes that were never merged
    pieces, rest = stream(TRAINED, ids)
    assert (pieces, rest) == (["a", "b", "", "", "", "𝄞"], "")
    pieces, rest = stream(TRAINED, ids[:-1])
    assert (pieces, rest) == (["a", "b", "", "", ""], "\ufffd")


@given(st.lists(st.integers(0, 420), max_size=30))
@settings(max_examples=200, deadline=None)
def test_streaming_any_ids_equals_decoding_them_at_once(ids: list[int]) -> None:
    """Random bytes, special tokens, and ids beyond the vocabulary."""
    pieces, rest = stream(TRAINED, ids)
    assert "".join(pieces) + rest == TRAINED.decode(ids)


@given(text=st.text(st.sampled_from("ab 数🙂é\n\ufffd"), max_size=20))
@settings(max_examples=200, deadline=None)
def test_streaming_with_byte_fallback(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "byte_fallback.json"
    tokenizer = Tokenizer.load(path if path.exists() else sentencepiece_like(path))
    pieces, rest = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) + rest == text == tokenizer.decode(tokenizer.encode(text))
