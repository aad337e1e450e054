"""Byte-level byte pair encoding, by the `tokenizers` library: GPT-2's kind of tokenizer, in one tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from polysketch.data.compressed import read_bytes
from polysketch.data.tokenization.decoders import byte_alphabet, is_byte_level
from polysketch.data.tokenization.end_of_text import END_OF_TEXT
from polysketch.data.tokenization.json_file import JsonTokenizer, description_of, require_possible_ids
from polysketch.extras import require
from polysketch.storage.outside import decoded

SMALLEST_VOCABULARY = 257


class BpeTokenizer(JsonTokenizer):
    """Byte-level BPE: merges of bytes inside the words of GPT-2's pattern, so that any text has an encoding.

    Training is reproducible: the same texts in the same order give the same file, byte for byte. A text too small to
    give the wanted number of merges gives fewer ids; ``vocab_size`` is the number there are.
    """

    kind = "bpe"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> Self:
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
        library = require("tokenizers")
        tokenizer = _byte_level(library, library.models.BPE())
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer, _file_of(tokenizer))

    @classmethod
    def from_bytes(cls, contents: bytes, path: Path, end_of_text: str | int | None = None) -> Self:
        """The tokenizer of a byte-level tokenizer.json, for instance that of GPT-2, GPT-NeoX or Llama 3.

        Raises:
            ValueError: As the base class; also when it is not byte-level.
            ImportError: The extra ``train`` is missing.
        """
        description = description_of(contents, path)
        if not describes_byte_level_bpe(description):
            raise ValueError(
                f"expected a byte-level BPE tokenizer (model BPE, decoder ByteLevel) in {path}, found model "
                f"{description['model'].get('type')}"
            )
        return super().from_bytes(contents, path, end_of_text)

    @classmethod
    def from_vocabulary_and_merges(
        cls, vocabulary: Path, merges: Path, end_of_text: str | int | None = None
    ) -> BpeTokenizer:
        """The tokenizer of GPT-2's two files: encoder.json and vocab.bpe, also called vocab.json and merges.txt.

        Args:
            vocabulary: JSON object from token to id, gzip-compressed or not.
            merges: A line ``left right`` for each merge, the first learned first; likewise.
            end_of_text: The token that ends a document, or its id; None for the one usual name.

        Raises:
            FileNotFoundError: One of them is missing.
            ValueError: A file is damaged, or the two do not belong together.
            ImportError: The extra ``train`` is missing.
        """
        library = require("tokenizers")
        ids, pairs = _read_vocabulary(vocabulary), _read_merges(merges)
        try:
            tokenizer = _byte_level(library, library.models.BPE(vocab=ids, merges=pairs))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"expected {merges} to belong to {vocabulary}, found merges of others: {error}") from error
        name = next((name for name in (end_of_text, END_OF_TEXT) if isinstance(name, str) and name in ids), None)
        if name is not None:  # these files do not say which tokens are special
            tokenizer.add_special_tokens([library.AddedToken(name, special=True, normalized=False)])
        return cls.from_bytes(_file_of(tokenizer), vocabulary, end_of_text)


def describes_byte_level_bpe(description: dict[str, Any]) -> bool:
    """Whether the JSON of a tokenizer.json is that of a byte-level BPE."""
    return description["model"].get("type") == "BPE" and is_byte_level(description.get("decoder"))


def _byte_level(library: Any, model: Any) -> Any:
    """A tokenizer of GPT-2's kind around a BPE model."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _file_of(tokenizer: Any) -> bytes:
    return tokenizer.to_str(pretty=False).encode()


def _read_vocabulary(path: Path) -> dict[str, int]:
    ids = decoded(read_bytes(path), path)
    if not isinstance(ids, dict) or not ids or not all(isinstance(index, int) for index in ids.values()):
        raise ValueError(f"expected a JSON object from token to id in {path}, found other JSON")
    require_possible_ids({"model": {"vocab": ids}}, path)
    return ids


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = read_bytes(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected merges as text in {path}, found other bytes: {error}") from error
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"expected two tokens on each line of {path}, found something else: is it a list of merges?")
    return [(left, right) for left, right in pairs]
