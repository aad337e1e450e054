"""Long texts are encoded in pieces that overlap, which gives the tokens of the whole text in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from polysketch.data.tokenization import TokenizerLike

PIECE_CHARACTERS = 1_000_000
OVERLAP_CHARACTERS = 16_384
# Tokens on either side of the place where two pieces are joined that both must have alike.
AGREEMENT_TOKENS = 32


class _Piece(NamedTuple):
    """Tokens of a part of the text, and where each ends in the text's bytes."""

    ids: np.ndarray
    ends: np.ndarray


def encoded_in_pieces(tokenizer: TokenizerLike, text: str) -> Iterator[np.ndarray]:
    """The tokens of a text, some at a time; joined they are those of ``tokenizer.encode(text)``.

    What a tokenizer does at a place depends on the text nearby. So pieces overlap, and two are joined in the middle of
    their overlap, where 32 tokens before and 32 after are the same in both. Where there is no such place, and for
    tokenizers that are not lossless, whose tokens do not say where they are, the text is encoded as a whole.

    Args:
        tokenizer: Any.
        text: Of any length.

    Returns:
        (n,) int64 arrays. Memory is that of a million characters, and of the text.
    """
    if len(text) <= PIECE_CHARACTERS + OVERLAP_CHARACTERS or not tokenizer.lossless:
        yield np.asarray(tokenizer.encode(text), dtype=np.int64)
        return
    joined = _joined(tokenizer, text)
    if joined is None:
        yield np.asarray(tokenizer.encode(text), dtype=np.int64)
        return
    yield from (part.astype(np.int64) for part in joined)


def _joined(tokenizer: TokenizerLike, text: str) -> list[np.ndarray] | None:
    """The tokens of pieces joined; None where two of them do not agree."""
    sizes = tokenizer.token_bytes()
    narrow = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    kept: list[np.ndarray] = []
    before, first = _piece(tokenizer, sizes, text[:PIECE_CHARACTERS], 0), 0
    end = PIECE_CHARACTERS
    while end < len(text):
        begin = end - OVERLAP_CHARACTERS
        begin_byte = int(before.ends[-1]) - len(text[begin:end].encode())
        end = min(len(text), begin + PIECE_CHARACTERS)
        after = _piece(tokenizer, sizes, text[begin:end], begin_byte)
        meeting = _meeting(before, after, begin_byte)
        if meeting is None or meeting[0] < first:
            return None
        kept.append(before.ids[first : meeting[0]].astype(narrow))
        before, first = after, meeting[1]
    return [*kept, before.ids[first:].astype(narrow)]


def _piece(tokenizer: TokenizerLike, sizes: np.ndarray, text: str, begin_byte: int) -> _Piece:
    ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    return _Piece(ids, begin_byte + np.cumsum(sizes[ids]))


def _meeting(before: _Piece, after: _Piece, begin_byte: int) -> tuple[int, int] | None:
    """How many tokens of the first piece to keep, and from which of the second to go on: in the middle if possible."""
    overlap = int(before.ends[-1]) - begin_byte
    places, left, right = np.intersect1d(before.ends, after.ends, return_indices=True)
    for candidate in np.argsort(np.abs(places - begin_byte - overlap // 2)):
        around = [
            ids[place + 1 - AGREEMENT_TOKENS : place + 1 + AGREEMENT_TOKENS]
            for ids, place in ((before.ids, left[candidate]), (after.ids, right[candidate]))
        ]
        if len(around[0]) == 2 * AGREEMENT_TOKENS and np.array_equal(around[0], around[1]):
            return int(left[candidate]) + 1, int(right[candidate]) + 1
    return None
