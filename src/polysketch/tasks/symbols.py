"""Texts whose tokens are symbols apart by spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Encoding(NamedTuple):
    """How texts become ids.

    Attributes:
        encode: a text -> ids.
        vocab_size: number of ids.
        alphabet: what ids stand for.
    """

    encode: Callable[[str], Sequence[int]]
    vocab_size: int
    alphabet: str


def symbol_encoding(texts: Iterable[str], symbols_of: Callable[[str], list[str]] = str.split) -> Encoding:
    """Ids from 1 on for the symbols of some texts, in the order of the alphabet.

    Args:
        texts: those to train on. Encoding a text with another symbol raises ValueError.
        symbols_of: the symbols of a text, in its order.
    """
    symbols = sorted({symbol for text in texts for symbol in symbols_of(text)})
    ids = {symbol: number for number, symbol in enumerate(symbols, start=1)}

    def encode(text: str) -> list[int]:
        try:
            return [ids[symbol] for symbol in symbols_of(text)]
        except KeyError as error:
            raise ValueError(f"expected symbols that training has, {' '.join(symbols)}, found {error}") from error

    return Encoding(encode, len(symbols) + 1, f"symbols {' '.join(symbols)}")
