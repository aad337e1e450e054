"""Tokenizers: the table from kind to class, and how the ``--tokenizer`` argument is understood.

========================  ==================================================================================
``bytes``                 a token is a byte; nothing to train
``bpe:N``                 byte-level BPE with N ids, trained on the training split (extra ``train``)
``sentencepiece:N``       SentencePiece unigram with N ids, trained likewise (extra ``sentencepiece``)
a file                    a tokenizer.json, GPT-2's encoder.json or vocab.bpe, a sentencepiece .model; also .gz
a folder                  of a transformers model, of a run, or a prepared one, whose tokenizer to use
========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from polysketch.data.tokenization.base import TokenizerLike, require_same_tokenizer
from polysketch.data.tokenization.bpe import BpeTokenizer
from polysketch.data.tokenization.byte_values import BytesTokenizer
from polysketch.data.tokenization.ids import TokenIds
from polysketch.data.tokenization.json_file import JsonTokenizer
from polysketch.data.tokenization.loading import TOKENIZERS, described_tokenizer, load_tokenizer
from polysketch.data.tokenization.sentence_pieces import SentencePieceTokenizer

# Several times the largest in use. Far more than this, and the libraries end the process when memory runs out.
LARGEST_VOCABULARY = 2**20


def build_tokenizer(
    specification: str, texts: Callable[[], Iterable[str]], end_of_text: str | None = None
) -> TokenizerLike:
    """The tokenizer a specification names, trained if need be.

    Args:
        specification: ``bytes``, ``bpe:N``, ``sentencepiece:N`` or a path; see the module.
        texts: Called for the training texts when the kind is trained.
        end_of_text: The token of a tokenizer file that ends a document; None leaves it to ``load_tokenizer``.

    Raises:
        ValueError: The specification names no kind and no file, or its size is wrong; or an end of text is given for a
            tokenizer that makes its own.
        ImportError: The extra that the kind needs is missing.
    """
    kind, size = parse_specification(specification, end_of_text)
    if kind is None:
        return load_tokenizer(specification, end_of_text)
    return TOKENIZERS[kind].train(texts(), size)


def parse_specification(specification: str, end_of_text: str | None = None) -> tuple[str | None, int | None]:
    """Kind and vocabulary size of a specification; (None, None) when it is an existing path.

    Raises:
        ValueError: It names no kind and no file, or its size is not a number, or an end of text is given beside a kind.
    """
    kind, colon, size = specification.partition(":")
    if kind in TOKENIZERS:
        if colon and not size.isdecimal():
            raise ValueError(f"expected a number of ids after {kind}:, found {size!r}")
        if colon and int(size) > LARGEST_VOCABULARY:
            raise ValueError(f"expected at most {LARGEST_VOCABULARY:,} ids after {kind}:, found {size}")
        if end_of_text is not None:
            raise ValueError(
                f"expected an end-of-text token only with a tokenizer that is read from a file, found {end_of_text!r} "
                f"with {specification}, which has its own"
            )
        return kind, int(size) if colon else None
    if Path(specification).exists():
        return None, None
    raise ValueError(
        f"expected a tokenizer bytes, bpe:N, sentencepiece:N or an existing file or folder, found {specification!r}"
    )


__all__ = [
    "TOKENIZERS",
    "BpeTokenizer",
    "BytesTokenizer",
    "JsonTokenizer",
    "SentencePieceTokenizer",
    "TokenIds",
    "TokenizerLike",
    "build_tokenizer",
    "described_tokenizer",
    "load_tokenizer",
    "parse_specification",
    "require_same_tokenizer",
]
