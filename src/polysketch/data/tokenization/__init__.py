"""Tokenizers: the table from kind to class, and how the ``--tokenizer`` argument is understood.

========================  ==================================================================================
``bytes``                 a token is a byte; nothing to train
``bpe:N``                 byte-level BPE with N ids, trained on the training split (extra ``train``)
``sentencepiece:N``       SentencePiece unigram with N ids, trained likewise (extra ``sentencepiece``)
a path                    a tokenizer.json, a sentencepiece .model, or a prepared folder whose tokenizer to use
========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from polysketch.data.description import DESCRIPTION_FILE, DataDescription, TokenizerDescription
from polysketch.data.tokenization.base import TokenizerLike, require_same_tokenizer
from polysketch.data.tokenization.bpe import BpeTokenizer
from polysketch.data.tokenization.byte_values import BytesTokenizer
from polysketch.data.tokenization.sentence_pieces import SentencePieceTokenizer

TOKENIZERS: dict[str, type[TokenizerLike]] = {
    cls.kind: cls for cls in (BytesTokenizer, BpeTokenizer, SentencePieceTokenizer)
}
FILE_SUFFIXES: dict[str, type[TokenizerLike]] = {".json": BpeTokenizer, ".model": SentencePieceTokenizer}


# Several times the largest in use. Far more than this, and the libraries end the process when memory runs out.
LARGEST_VOCABULARY = 2**20


def build_tokenizer(specification: str, texts: Callable[[], Iterable[str]]) -> TokenizerLike:
    """The tokenizer a specification names, trained if need be.

    Args:
        specification: ``bytes``, ``bpe:N``, ``sentencepiece:N`` or a path; see the module.
        texts: Called for the training texts when the kind is trained.

    Raises:
        ValueError: The specification names no kind and no file, or its size is wrong.
        ImportError: The extra that the kind needs is missing.
    """
    kind, size = parse_specification(specification)
    return load_tokenizer(specification) if kind is None else TOKENIZERS[kind].train(texts(), size)


def parse_specification(specification: str) -> tuple[str | None, int | None]:
    """Kind and vocabulary size of a specification; (None, None) when it is an existing path.

    Raises:
        ValueError: It names no kind and no file, or its size is not a number.
    """
    kind, colon, size = specification.partition(":")
    if kind in TOKENIZERS:
        if colon and not size.isdecimal():
            raise ValueError(f"expected a number of ids after {kind}:, found {size!r}")
        if colon and int(size) > LARGEST_VOCABULARY:
            raise ValueError(f"expected at most {LARGEST_VOCABULARY:,} ids after {kind}:, found {size}")
        return kind, int(size) if colon else None
    if Path(specification).exists():
        return None, None
    raise ValueError(
        f"expected a tokenizer bytes, bpe:N, sentencepiece:N or an existing file or prepared folder, "
        f"found {specification!r}"
    )


def load_tokenizer(path: str | Path) -> TokenizerLike:
    """Read a tokenizer.json, a sentencepiece .model, or the tokenizer of a prepared folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: It is none of the three, or is damaged.
        ImportError: The extra that the kind needs is missing.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a tokenizer file or a prepared folder, found nothing at {path}")
    if path.is_dir():
        return described_tokenizer(path, DataDescription.read(path / DESCRIPTION_FILE).tokenizer)
    if path.suffix not in FILE_SUFFIXES:
        raise ValueError(f"expected a tokenizer file ending in {' or '.join(FILE_SUFFIXES)}, found {path}")
    return FILE_SUFFIXES[path.suffix].load(path)


def described_tokenizer(folder: Path, description: TokenizerDescription) -> TokenizerLike:
    """The tokenizer of a prepared folder, checked against its description.

    Raises:
        FileNotFoundError: The tokenizer file is gone.
        ValueError: The kind is unknown, or the file is not the one the data was prepared with.
    """
    if description.kind not in TOKENIZERS:
        raise ValueError(
            f"expected a tokenizer kind of {', '.join(TOKENIZERS)} in {folder}, found {description.kind!r}"
        )
    path = folder / (description.file or "")
    if not path.exists():
        raise FileNotFoundError(
            f"expected the tokenizer file {path}, found nothing: the folder was copied incompletely"
        )
    tokenizer = TOKENIZERS[description.kind].load(path)
    found = (tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
    expected = (description.sha256, description.vocab_size, description.end_of_text)
    if found != expected:
        raise ValueError(
            f"expected in {folder} the tokenizer its data was prepared with (sha256 {description.sha256[:12]}, "
            f"{description.vocab_size} ids), found another (sha256 {found[0][:12]}, {found[1]} ids): "
            "the tokenizer file was altered or exchanged; prepare again"
        )
    return tokenizer


__all__ = [
    "TOKENIZERS",
    "BpeTokenizer",
    "BytesTokenizer",
    "SentencePieceTokenizer",
    "TokenizerLike",
    "build_tokenizer",
    "described_tokenizer",
    "load_tokenizer",
    "parse_specification",
    "require_same_tokenizer",
]
