"""The bytes that each id of a tokenizer.json stands for, worked out from the decoder that the file names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

# One decoder of the file as a function of a token's text; text goes through them in order, and becomes bytes last.
TextStep = Callable[[str], str]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# What these do to whole sequences, joining and stripping their ends, has no share in the bytes of a single token.
_OF_SEQUENCES = {"Fuse", "Strip", "ByteFallback"}


def pieces_of(tokenizer: Any, decoder: dict[str, Any] | None) -> list[bytes]:
    """The bytes of each id; ids that a file leaves out, and special ones, have none.

    Where a tokenizer writes words without the space before them (WordPiece, or no decoder at all), each word's piece
    has one: the library, too, puts spaces between them.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
        decoder: The entry ``decoder`` of its file.

    Raises:
        ValueError: The decoder is of a kind whose tokens have no bytes of their own.
    """
    to_bytes = _decoding(decoder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for text, index in vocabulary.items():
        if index not in added:
            pieces[index] = to_bytes(text)
        elif not added[index].special:
            pieces[index] = added[index].content.encode()
    return pieces


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte value, as a map from character to byte.

    Bytes that print keep their own character; the others (controls, space, some of Latin-1) take U+0100 onwards.
    """
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [value for value in range(256) if value not in printing]
    alphabet = {chr(value): value for value in printing}
    return alphabet | {chr(0x100 + position): value for position, value in enumerate(others)}


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether the decoder writes tokens in GPT-2's alphabet of bytes."""
    return any(part["type"] == "ByteLevel" for part in _flat(decoder))


def _decoding(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """A token's text to its bytes."""
    parts = _flat(decoder)
    last = _from_alphabet if is_byte_level(decoder) else str.encode
    steps = [_step(part) for part in parts if part["type"] not in {"ByteLevel", *_OF_SEQUENCES}]
    if not parts:
        steps = [lambda text: " " + text]
    falls_back = any(part["type"] == "ByteFallback" for part in parts)

    def to_bytes(text: str) -> bytes:
        if falls_back and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return last(functools.reduce(lambda so_far, step: step(so_far), steps, text))

    return to_bytes


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder, or those that it is a sequence of.

    Raises:
        ValueError: one has no type, which the library takes for granted where it can tell it by other fields.
    """
    if decoder is None:
        return []
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if not isinstance(kind, str) or (kind == "Sequence" and not isinstance(decoder.get("decoders"), list)):
        raise ValueError(f"expected a decoder with a type, found {decoder!r:.100}")
    return [part for each in decoder["decoders"] for part in _flat(each)] if kind == "Sequence" else [decoder]


def _step(part: dict[str, Any]) -> TextStep:
    """What one decoder does to the text of one token."""
    match part:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return lambda text: text.replace(pattern, content)
        case {"type": "Metaspace", "replacement": mark}:
            return lambda text: text.replace(mark, " ")
        case {"type": "WordPiece", "prefix": prefix}:
            return lambda text: text.removeprefix(prefix) if text.startswith(prefix) else " " + text
        case {"type": "BPEDecoder", "suffix": suffix}:
            return lambda text: text.removesuffix(suffix) + " " * text.endswith(suffix)
    raise ValueError(
        "expected a decoder ByteLevel, Metaspace, Replace of a string, ByteFallback, WordPiece or BPEDecoder, found "
        f"{part.get('type')}: its tokens have no bytes of their own"
    )


def _from_alphabet(text: str) -> bytes:
    alphabet = byte_alphabet()
    if not alphabet.keys() >= set(text):  # a token put into the vocabulary by hand, as the library treats it
        return text.encode()
    return bytes(alphabet[character] for character in text)
