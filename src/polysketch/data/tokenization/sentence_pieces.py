"""SentencePiece (unigram) with settings that lose nothing: the kind of vocabulary of the PolySketchFormer paper."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polysketch.data.compressed import read_bytes
from polysketch.data.tokenization.base import TokenizerLike, check_unicode
from polysketch.data.tokenization.end_of_text import END_OF_TEXT
from polysketch.extras import require

SPACE_MARK = "\u2581"
# 256 byte pieces, the unknown piece, the end of text, and room for at least a few pieces.
SMALLEST_VOCABULARY = 300
# The library skips sentences longer than its limit of 4192 bytes without an error, so longer lines are cut.
LONGEST_LINE = 1000


class SentencePieceTokenizer(TokenizerLike):
    """SentencePiece's unigram model without normalisation and with byte fallback, so that any text has an encoding.

    The library writes a space as U+2581 and would read a U+2581 of the text back as a space; here such characters
    bypass it as three byte pieces, so that they survive too.
    """

    kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, processor: Any, serialized: bytes, end_of_text: str | int | None = None) -> None:
        """Wrap a ``sentencepiece.SentencePieceProcessor`` and the file it came from.

        Args:
            processor: The processor.
            serialized: The file.
            end_of_text: The control piece that ends a document, or its id; None for the end of sentence.

        Raises:
            ValueError: There is no such control piece.
        """
        self._processor = processor
        self._serialized = serialized
        pieces = [_piece(processor, index) for index in range(processor.vocab_size())]
        usual = processor.eos_id() if processor.eos_id() >= 0 else None
        super().__init__(pieces, _end_of_text(processor, end_of_text), usual_end_of_text=usual)
        byte_ids = {processor.id_to_piece(index): index for index in range(self.vocab_size) if processor.IsByte(index)}
        self._space_mark_ids = [byte_ids[f"<0x{value:02X}>"] for value in SPACE_MARK.encode()] if byte_ids else []

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> SentencePieceTokenizer:
        """Learn a unigram vocabulary from the lines of the texts; see the base class.

        Raises:
            ValueError: The vocabulary size is missing or too small.
            ImportError: The extra ``sentencepiece`` is missing.
        """
        if vocab_size is None or vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"expected sentencepiece:N with N at least {SMALLEST_VOCABULARY} (256 byte pieces and some others), "
                f"found sentencepiece:{vocab_size}"
            )
        library = require("sentencepiece")
        model = io.BytesIO()
        library.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=model, vocab_size=vocab_size, **LOSSLESS_SETTINGS
        )
        return cls(library.SentencePieceProcessor(model_proto=model.getvalue()), model.getvalue())

    @classmethod
    def load(cls, path: Path, end_of_text: str | int | None = None) -> SentencePieceTokenizer:
        """Read a .model file, gzip-compressed or not.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no sentencepiece model, or has no such piece to end documents with.
            ImportError: The extra ``sentencepiece`` is missing.
        """
        contents = read_bytes(path)
        library = require("sentencepiece")
        try:
            processor = library.SentencePieceProcessor(model_proto=contents)
        except (RuntimeError, UnicodeDecodeError) as error:  # its message may quote bytes of the file
            raise ValueError(f"expected a sentencepiece model in {path}, found a file that does not load") from error
        try:
            return cls(processor, contents, end_of_text)
        except UnicodeDecodeError as error:
            raise ValueError(f"expected a sentencepiece model of pieces in UTF-8 in {path}, found others") from error

    @property
    def processor(self) -> Any:
        """The library's ``SentencePieceProcessor``, for those who rebuild the model elsewhere."""
        return self._processor

    def serialized(self) -> bytes:
        """The .model file, as it was read or trained."""
        return self._serialized

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text."""
        check_unicode(texts)
        return [self._encode_around_marks(text) for text in texts]

    def _encode_around_marks(self, text: str) -> list[int]:
        if SPACE_MARK not in text or not self._space_mark_ids:
            return self._processor.encode(text)
        first, *others = (self._processor.encode(part) for part in text.split(SPACE_MARK))
        for part in others:
            first += self._space_mark_ids + part
        return first


LOSSLESS_SETTINGS = {
    "model_type": "unigram",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
    # A small text may not hold as many pieces as asked for; it then gets fewer.
    "hard_vocab_limit": False,
    "unk_id": 0,
    "eos_id": 1,
    "eos_piece": END_OF_TEXT,
    "bos_id": -1,
    "pad_id": -1,
    # Sums of several threads may come in another order; the vocabulary must not depend on the number of cores.
    "num_threads": 1,
    "minloglevel": 2,
}


def _end_of_text(processor: Any, asked: str | int | None) -> int:
    """The id of the control piece asked for, or of the end of sentence."""
    if asked is None and processor.eos_id() >= 0:
        return processor.eos_id()
    controls = [index for index in range(processor.vocab_size()) if processor.IsControl(index)]
    names = [processor.id_to_piece(index) for index in controls]
    for index, name in zip(controls, names, strict=True):
        if asked in (index, name):
            return index
    raise ValueError(
        f"expected a control piece to end documents with, found {'no end of sentence' if asked is None else asked} in "
        f"a sentencepiece model whose control pieces are {', '.join(names) or 'none'}: name one with --end-of-text"
    )


def _piece(processor: Any, index: int) -> bytes:
    """The bytes of one id: a byte piece is its byte, control pieces have none, the unknown piece is U+FFFD."""
    if processor.IsByte(index):
        return bytes([int(processor.id_to_piece(index)[1:-1], 16)])
    if processor.IsControl(index) or processor.IsUnused(index):
        return b""
    if processor.IsUnknown(index):
        return "\ufffd".encode()
    return processor.id_to_piece(index).replace(SPACE_MARK, " ").encode()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), LONGEST_LINE):
                yield line[start : start + LONGEST_LINE].replace(SPACE_MARK, "").replace("\0", "")
