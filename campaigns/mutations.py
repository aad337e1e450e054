"""Bytes that were changed on purpose: bits, cuts, insertions, and values, names and depths of JSON.

A mutation begins with a real file. Of JSON, and of the header of a safetensors file, it changes what was parsed, so
that the result still parses and what is behind the parser is reached. A sha256 that a file has of itself goes: whoever
makes a hostile file can make a right one.
"""

import copy
import gzip
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        1.5,
        1e308,
        -1e-308,
        2**31,
        2**53,
        2**63 - 1,
        2**64,
        10**400,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "../x", "/etc/passwd", "\x1b[31m", "nul\0", "\ud800", "9" * 5000, "a" * 100_000, "__class__", "None"),
    *([], {}, [[]], {"": None}, [None], ["x"], [-1], [2**40, 2**40], {"x": {"x": {}}}),
)
_BYTES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\n",
    b"{",
    b"[" * 100_000,
    b'"',
    b"\x1f\x8b\x08\0",
    b"\x80\x04\x95",
    b"\xed\xa0\x80",
    b"\r\n\r\n",
)
_SEALS = ("sha256",)


def mutated(content: bytes, name: str, draw: random.Random) -> bytes:
    """A changed copy of a file.

    Args:
        content: of the file.
        name: of the file, which tells what it holds.
        draw: what chooses.
    """
    if name.endswith(".gz") and draw.random() < 0.8:
        return gzip.compress(mutated(gzip.decompress(content), name[:-3], draw), 1)
    if name.endswith(".safetensors") and draw.random() < 0.75:
        return _safetensors(content, draw)
    if name.endswith((".json", ".jsonl")) and draw.random() < 0.8:
        return _json_lines(content, draw) if name.endswith(".jsonl") else _json(content, draw)
    return _changed_bytes(content, draw)


def _changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """A few changes of bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(len(content) + 1)
        end = min(len(content), place + draw.choice((1, 1, 2, 4, 8, 50)))
        way = draw.randrange(6)
        if way == 0 and content:
            place = min(place, len(content) - 1)
            content = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        elif way == 1:
            content = content[:place]
        elif way == 2:
            content = content[:place] + draw.choice(_BYTES) + content[place:]
        elif way == 3:
            content = content[:place] + content[end:]
        elif way == 4:
            content = content[:place] + draw.randbytes(end - place) + content[end:]
        else:
            content = content[:place] + content[place:end] * draw.choice((2, 3, 1000)) + content[end:]
    return content


def _json(content: bytes, draw: random.Random) -> bytes:
    """Changed values of a JSON file."""
    value = _without_seal(json.loads(content))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        value = _changed_value(value, draw)
    text = json.dumps(value)
    if draw.random() < 0.05:
        text = text.replace(":", ":" + "[" * draw.choice((10, 5_000, 1_000_000)), 1)
    return text.encode("utf-8", "surrogatepass")


def _json_lines(content: bytes, draw: random.Random) -> bytes:
    """One changed line."""
    lines = content.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _json(lines[place], draw)
    return b"\n".join(lines) + b"\n"


def _without_seal(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if name not in _SEALS or isinstance(one, dict)}
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a value."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield value, name
            yield from _places(one)
    elif isinstance(value, list):
        for place, one in enumerate(value[:50]):
            yield value, place
            yield from _places(one)


def _changed_value(value: Any, draw: random.Random) -> Any:
    """One value, name or depth changed, at any place."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or draw.random() < 0.03:
        return draw.choice(_VALUES)
    owner, key = draw.choice(places)
    way = draw.randrange(8)
    if way == 0:
        del owner[key]
    elif way == 1 and isinstance(owner, dict):
        owner[draw.choice(("", "x", "__init__", "sha256", key + "s"))] = owner.pop(key)
    elif way == 2:
        other, name = draw.choice(places)
        owner[key] = (
            copy.deepcopy(other[name]) if name in other or (isinstance(other, list) and name < len(other)) else None
        )
    elif way == 3 and isinstance(owner[key], int | float):
        owner[key] = draw.choice((owner[key] + 1, -owner[key], owner[key] * 1000, owner[key] * 2**40, str(owner[key])))
    elif way == 4 and isinstance(owner[key], list | dict):
        owner[key] = [owner[key]] if isinstance(owner[key], dict) else owner[key] * draw.choice((0, 2, 1000))
    else:
        owner[key] = draw.choice(_VALUES)
    return value


def _safetensors(content: bytes, draw: random.Random) -> bytes:
    """A changed header; its length is right most of the time."""
    (length,) = struct.unpack("<Q", content[:8])
    header = _json(content[8 : 8 + length], draw)
    said = (
        draw.choice((len(header), len(header), len(header), 0, 2**40, 2**64 - 1))
        if draw.random() < 0.2
        else len(header)
    )
    return struct.pack("<Q", said) + header + content[8 + length :]
