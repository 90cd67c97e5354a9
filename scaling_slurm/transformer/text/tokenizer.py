"""Text to ids and back over one tokenizer.json. Knows no files of tokens and no model.

Text is never taken for a special token, and no special token is added unasked: both are explicit here, whatever the
file's own flags say.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from scaling_slurm.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>", "</s>")
"""Special tokens that end a document, by the families that use them; the first one that a tokenizer has counts."""
SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end of a document."""


class Tokenizer:
    """Ids are those of the file; `vocab_size` is the largest id + 1, added tokens included."""

    def __init__(self, backend: tokenizers.Tokenizer, source: Path | str) -> None:
        # A tokenizer.json may ask for both, which would cut documents or fill them up silently.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        names = [name for name in END_NAMES if name in special]
        if not names:
            raise ConfigError(
                f"{source} has no special token that ends a document",
                f"one of {', '.join(END_NAMES)} must be among its added special tokens",
            )
        self.end_of_document = names[0]
        self.end_of_document_id = special[names[0]]

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """From a tokenizer.json."""
        if not Path(path).is_file():
            raise ConfigError(f"there is no tokenizer {path}", "it must be a tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), path)
        except ConfigError:
            raise
        except Exception as error:  # the library raises nothing narrower
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{path} is not a tokenizer.json: {reason}",
                "a file of Hugging Face's tokenizers library is needed",
                "`scaling prepare --train-tokenizer SIZE` makes one",
            ) from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE (https://aclanthology.org/P16-1162); the same texts give the same tokenizer.

        It has exactly `vocab_size` ids unless the texts hold too few different pairs to merge.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"a vocabulary of {vocab_size} is too small",
                f"at least {SMALLEST_VOCABULARY}: the 256 bytes and {END_OF_DOCUMENT}",
                "--train-tokenizer",
            )
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend, "the new tokenizer")

    def save(self, path: Path | str) -> None:
        self._backend.save(str(path))

    def encode(self, text: str, add_end: bool = False) -> list[int]:
        """Ids of a text, followed by the end of the document if asked for."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return [*ids, self.end_of_document_id] if add_end else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, computed in parallel; no end of document."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelt out; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def cuts_at_lines(self) -> bool:
        """Whether ids stay the same when a text is cut behind a newline that stands between two non-blank characters.

        So it is for byte-level tokenizers that neither normalise nor put a space in front.
        """
        parts = json.loads(self._backend.to_str())
        steps = parts["pre_tokenizer"] or {}
        byte_level = [step for step in steps.get("pretokenizers", [steps]) if step.get("type") == "ByteLevel"]
        return parts["normalizer"] is None and any(not step["add_prefix_space"] for step in byte_level)


class StreamDecoder:
    """Decodes ids one at a time; the pieces joined are exactly what decoding all ids at once gives.

    A piece is held back while it may be part of a character. What came last is decoded again with it, because
    the text of an id may depend on the one before. (With byte-fallback decoders, which replace a whole run of bytes if
    one is wrong, this holds for valid text; after a wrong byte the stream keeps the characters that came before it.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        """The text that has become certain with this id; empty while a character is incomplete."""
        self._pending.append(id)
        piece = self._piece()
        if piece.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def flush(self) -> str:
        """What is still held back, at the end: incomplete characters as U+FFFD."""
        piece = self._piece()
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]
