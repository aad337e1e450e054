"""Byte-level byte pair encoding, by the `tokenizers` library: GPT-2's kind of tokenizer, in one tokenizer.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polysketch.data.extras import require
from polysketch.data.tokenization.base import TokenizerLike, check_unicode

END_OF_TEXT = "<|endoftext|>"
# Names that other people's tokenizer files use for the same thing.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCABULARY = 257


class BpeTokenizer(TokenizerLike):
    """Byte-level BPE: merges of bytes inside the words of GPT-2's pattern, so that any text has an encoding.

    Training is reproducible: the same texts in the same order give the same file, byte for byte. A text too small to
    give the wanted number of merges gives fewer ids; ``vocab_size`` is the number there are.
    """

    kind = "bpe"
    file_name = "tokenizer.json"

    def __init__(self, tokenizer: Any, serialized: bytes) -> None:
        """Wrap a ``tokenizers.Tokenizer`` with a byte-level decoder and its file; see ``load`` for the checks."""
        self._serialized = serialized
        # Text that spells a special token stays text: a document cannot end itself or smuggle in control tokens.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        super().__init__(_pieces(tokenizer), _end_of_text(tokenizer))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> BpeTokenizer:
        """Learn merges from texts; see the base class.

        Raises:
            ValueError: The vocabulary size is missing or below 257 (256 bytes and the end of text).
            ImportError: The extra ``train`` is missing.
        """
        if vocab_size is None or vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"expected bpe:N with N at least {SMALLEST_VOCABULARY} (256 bytes and the end of text), "
                f"found bpe:{vocab_size}"
            )
        library = require("tokenizers", "train")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer, tokenizer.to_str(pretty=False).encode())

    @classmethod
    def load(cls, path: Path) -> BpeTokenizer:
        """Read a tokenizer.json with a byte-level decoder, for instance that of GPT-2, GPT-NeoX or Llama 3.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no tokenizer.json, is not byte-level, or has no end-of-text token.
            ImportError: The extra ``train`` is missing.
        """
        contents = path.read_bytes()
        _require_byte_level(contents, path)
        library = require("tokenizers", "train")
        try:
            tokenizer = library.Tokenizer.from_buffer(contents)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"expected a tokenizer.json in {path}, found one that does not load: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, contents)

    def serialized(self) -> bytes:
        """The tokenizer.json, as it was read or trained."""
        return self._serialized

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        check_unicode(texts)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte value, as a map from character to byte.

    Bytes that print keep their own character; the others (controls, space, some of Latin-1) take U+0100 onwards.
    """
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [value for value in range(256) if value not in printing]
    alphabet = {chr(value): value for value in printing}
    return alphabet | {chr(0x100 + position): value for position, value in enumerate(others)}


def _pieces(tokenizer: Any) -> list[bytes]:
    """The bytes of each id; ids that a file leaves out, and special ones, have none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for text, index in vocabulary.items():
        if index not in added:
            pieces[index] = bytes(byte_alphabet()[character] for character in text)
        elif not added[index].special:
            pieces[index] = added[index].content.encode()
    return pieces


def _end_of_text(tokenizer: Any) -> int:
    ids = [tokenizer.token_to_id(name) for name in END_OF_TEXT_NAMES]
    found = [index for index in ids if index is not None]
    if not found:
        raise ValueError(f"expected a tokenizer with one of the tokens {', '.join(END_OF_TEXT_NAMES)}, found none")
    return found[0]


def _require_byte_level(serialized: bytes, path: Path) -> None:
    try:
        contents = json.loads(serialized)
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"expected a tokenizer.json in {path}, found something that is not JSON: {error}") from error
    if not isinstance(contents, dict) or "model" not in contents:
        raise ValueError(f"expected a tokenizer.json of the tokenizers library in {path}, found other JSON")
    model = (contents["model"] or {}).get("type")
    decoder = (contents.get("decoder") or {}).get("type")
    if model != "BPE" or decoder != "ByteLevel":
        raise ValueError(
            f"expected a byte-level BPE tokenizer (model BPE, decoder ByteLevel) in {path}, found model {model}, "
            f"decoder {decoder}: a sentencepiece tokenizer can be given as its .model file"
        )
