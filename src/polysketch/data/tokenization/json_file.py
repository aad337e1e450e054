"""Any tokenizer.json of the `tokenizers` library: byte-level BPE, BPE or unigram with byte fallback, WordPiece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from polysketch.data.compressed import read_bytes
from polysketch.data.tokenization.base import TokenizerLike, check_unicode
from polysketch.data.tokenization.bounded import has_patterns, within_time
from polysketch.data.tokenization.decoders import pieces_of
from polysketch.data.tokenization.end_of_text import choose_end_of_text, usual_end_of_text
from polysketch.extras import require
from polysketch.storage.outside import decoded

T = TypeVar("T")

# Ten times the largest in use: a table of all ids is made, whichever of them there are.
LARGEST_ID = 2**22


class JsonTokenizer(TokenizerLike):
    """A tokenizer.json as its author wrote it: ids are those the `tokenizers` library gives.

    Beginnings and ends of text that the file would add to every text are left out, and text that spells a special
    token is encoded as text; only a unigram model, whose vocabulary has the special tokens as words, drops what spells
    its end of text. Kinds that normalise text or do not know every character are not ``lossless``.
    """

    kind = "json"
    file_name = "tokenizer.json"

    def __init__(self, tokenizer: Any, serialized: bytes, end_of_text: str | int | None = None) -> None:
        """Wrap a ``tokenizers.Tokenizer`` and its file; see ``from_bytes`` for the checks.

        Args:
            tokenizer: The tokenizer.
            serialized: Its file.
            end_of_text: The token that ends a document, or its id; None for the one usual name in the file.

        Raises:
            ValueError: There is no such token, or no single one of the usual names.
        """
        self._serialized = serialized
        description = decoded(serialized, "the tokenizer.json")
        self._has_patterns = has_patterns(description)
        # Text that spells a special token stays text: a document cannot end itself or smuggle in control tokens.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        special = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        usual = usual_end_of_text(vocabulary, special)
        chosen = choose_end_of_text(end_of_text, vocabulary, special, "the tokenizer.json")
        pieces = pieces_of(tokenizer, description.get("decoder"))
        pieces[chosen] = b""
        super().__init__(pieces, chosen, usual_end_of_text=vocabulary[usual[0]] if len(usual) == 1 else None)
        if chosen not in special.values():
            self._require_text_that_cannot_end_itself(tokenizer.id_to_token(chosen))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> Self:
        """There is nothing to train: this is the kind of tokenizers that others made.

        Raises:
            ValueError: Always.
        """
        raise ValueError("expected bpe:N or sentencepiece:N to train, or the path of a tokenizer.json, found json")

    @classmethod
    def load(cls, path: Path, end_of_text: str | int | None = None) -> Self:
        """Read a tokenizer.json, gzip-compressed or not; see ``from_bytes``.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError, ImportError: As ``from_bytes``.
        """
        return cls.from_bytes(read_bytes(path), path, end_of_text)

    @classmethod
    def from_bytes(cls, contents: bytes, path: Path, end_of_text: str | int | None = None) -> Self:
        """The tokenizer that the contents of a tokenizer.json describe.

        Args:
            contents: The file.
            path: Where it was read, for messages.
            end_of_text: The token that ends a document, or its id; None for the one usual name in the file.

        Raises:
            ValueError: It is no tokenizer.json, its decoder is unknown, or its end-of-text token is ambiguous.
            ImportError: The extra ``train`` is missing.
        """
        require_possible_ids(description_of(contents, path), path)
        library = require("tokenizers")
        try:
            tokenizer = within_time(lambda: library.Tokenizer.from_buffer(contents), len(contents), "a tokenizer")
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"expected a tokenizer.json in {path}, found one that does not load: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        try:
            return cls(tokenizer, contents, end_of_text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def serialized(self) -> bytes:
        """The tokenizer.json, as it was read or trained."""
        return self._serialized

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, on all cores.

        Raises:
            ValueError: A text that UTF-8 cannot hold, or one on which a regular expression of the file takes too long.
        """
        check_unicode(texts)
        encoded = self._bounded(lambda: self._encoded(texts), texts)
        end = self.end_of_text
        return [[index for index in ids if index != end] if end in ids else ids for ids in encoded]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"expected a tokenizer.json that encodes any text, found one that does not: {error}"
            ) from error
        return [encoding.ids for encoding in encoded]

    def _bounded(self, call: Callable[[], T], texts: list[str]) -> T:
        """What a call of the library gives; within a time where the file has regular expressions."""
        if not self._has_patterns:
            return call()
        return within_time(call, sum(map(len, texts)), "the tokens of a text")

    def _require_text_that_cannot_end_itself(self, token: str) -> None:
        if self.end_of_text in self._bounded(lambda: self._encoded([token]), [token])[0]:
            raise ValueError(
                f"expected an end-of-text token that text cannot spell, found {token!r}, which is a word of the "
                "vocabulary: name a special token with --end-of-text"
            )


def require_possible_ids(description: dict[str, Any], path: Path) -> None:
    """Refuse ids for which a library would make room that there is not.

    Raises:
        ValueError: an id below 0, or beyond all that is in use.
    """
    vocabulary = description["model"].get("vocab")
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    added = description.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    for index in ids:
        if isinstance(index, int) and not 0 <= index < LARGEST_ID:
            raise ValueError(f"expected ids from 0 to {LARGEST_ID - 1:,} in {path}, found {min(index, 2**63)}")


def description_of(contents: bytes, path: Path) -> dict[str, Any]:
    """The JSON of a tokenizer.json.

    Raises:
        ValueError: It is not JSON, or not that of the tokenizers library.
    """
    description = decoded(contents, f"the tokenizer.json {path}")
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise ValueError(f"expected a tokenizer.json of the tokenizers library in {path}, found other JSON")
    return description
