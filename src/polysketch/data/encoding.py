"""Documents turned into tokens, a batch at a time, by this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polysketch.data.corpus import Corpus, Document, Place
from polysketch.data.description import SPLITS
from polysketch.data.long_texts import encoded_in_pieces
from polysketch.data.tokenization import TOKENIZERS, TokenizerLike
from polysketch.data.writer import token_dtype

# Text encoded in one call: enough to keep all cores busy, little enough that memory stays small.
BATCH_BYTES = 4_000_000
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Batch:
    """Documents that are encoded together.

    Attributes:
        documents: At least one.
        place: Where the corpus is after them.
    """

    documents: list[Document]
    place: Place


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one split in a batch.

    Attributes:
        tokens: Their ids one after another, each document with its end of text.
        documents: How many.
        bytes: Length of their texts in UTF-8.
    """

    tokens: np.ndarray
    documents: int
    bytes: int


Encoded = dict[str, EncodedDocuments]
"""The documents of a batch by their split."""


def batches(corpus: Corpus, start: Place) -> Iterator[Batch]:
    """The documents of a corpus from a place on, about 4 MB of text at a time."""
    gathered: list[Document] = []
    size = 0
    for document in corpus.documents(start):
        gathered.append(document)
        size += document.num_bytes
        if size >= BATCH_BYTES or len(gathered) >= BATCH_DOCUMENTS:
            yield Batch(gathered, corpus.place())
            gathered, size = [], 0
    if gathered:
        yield Batch(gathered, corpus.place())


class Encoder:
    """Encodes documents and checks that no byte got lost, where the tokenizer promises that."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes()
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.end_of_text], dtype=self._dtype)

    def __call__(self, documents: Sequence[Document]) -> Encoded:
        """The tokens of some documents, by split.

        Raises:
            ValueError: The tokenizer lost bytes of a document.
        """
        short = [document.text for document in documents if document.num_bytes <= BATCH_BYTES]
        encoded = iter(self._tokenizer.encode_batch(short))
        parts: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        for document in documents:
            is_short = document.num_bytes <= BATCH_BYTES
            pieces = [next(encoded)] if is_short else encoded_in_pieces(self._tokenizer, document.text)
            parts[document.split or "train"] += [self._tokens_of(document, pieces), self._end]
        return {name: _joined(name, documents, part) for name, part in parts.items() if part}

    def _tokens_of(self, document: Document, pieces: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
        tokens, found = [], 0
        for piece in pieces:
            ids = np.asarray(piece, dtype=np.int64)
            tokens.append(ids.astype(self._dtype))
            found += int(self._token_bytes[ids].sum())
        self._require_all_bytes(document, found)
        return np.concatenate(tokens) if len(tokens) > 1 else tokens[0]

    def _require_all_bytes(self, document: Document, found: int) -> None:
        if self._tokenizer.lossless and found != document.num_bytes:
            raise ValueError(
                f"expected tokens for {document.num_bytes} bytes of {document.origin}, found tokens for {found}: the "
                f"tokenizer {self._tokenizer.name} does not keep all of this text"
            )


def _joined(name: str, documents: Sequence[Document], parts: list[np.ndarray]) -> EncodedDocuments:
    num_bytes = sum(document.num_bytes for document in documents if (document.split or "train") == name)
    return EncodedDocuments(np.concatenate(parts), len(parts) // 2, num_bytes)


@dataclass(frozen=True)
class PackedTokenizer:
    """A tokenizer on its way to another process.

    Attributes:
        kind: Key of ``TOKENIZERS``.
        contents: What its ``save`` writes.
        end_of_text: Id of the token that ends a document.
        sha256: Its fingerprint.
    """

    kind: str
    contents: bytes
    end_of_text: int
    sha256: str

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> PackedTokenizer:
        """Pack a tokenizer of the table.

        Raises:
            ValueError: It is of a class of its own, which another process would not know.
        """
        if TOKENIZERS.get(tokenizer.kind) is not type(tokenizer):
            raise ValueError(
                f"expected a tokenizer of {', '.join(TOKENIZERS)} for several workers, found one of "
                f"{type(tokenizer).__name__}: prepare with one worker"
            )
        return cls(tokenizer.kind, tokenizer.serialized(), tokenizer.end_of_text, tokenizer.sha256)

    def unpacked(self) -> TokenizerLike:
        """The tokenizer."""
        kind = TOKENIZERS[self.kind]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (kind.file_name or "none")
            path.write_bytes(self.contents)
            tokenizer = kind.load(path, self.end_of_text)
        if tokenizer.sha256 != self.sha256:
            raise ValueError(f"expected the tokenizer {self.sha256[:12]} in a worker, found {tokenizer.sha256[:12]}")
        return tokenizer
