"""A document, and the rules by which raw bytes become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DEFAULT_ENCODING = "utf-8"
FORMAT_NAMES = ("auto", "text", "jsonl", "csv", "tsv", "parquet")


_LONGEST_PATTERN = 1_000


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text that a model sees as one sequence, ended by an end-of-text token.

    Attributes:
        text: The text, holding no lone surrogates.
        num_bytes: Its length in UTF-8.
        split: The split its source gives, or None where a hash decides.
        origin: File and row, for messages.
    """

    text: str
    num_bytes: int
    split: str | None
    origin: str


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read.

    Attributes:
        text_field: Field of a JSON line, column of a table, feature of a dataset that holds the text.
        encoding: Of text files and JSON lines.
        undecodable: What becomes of text that the encoding does not allow: ``"error"``, ``"skip"`` (leave the document
            out and count it) or ``"replace"`` (with U+FFFD).
        cut_text: Cut plain text files at the first line end after this many bytes, or where the line is long at a
            space, each piece a document of its own; 0 keeps them whole. None leaves it to ``prepare``, see
            ``corpus.cutting``.
        format: What files hold whatever their names end with, or ``"auto"``: text, jsonl, csv, tsv, parquet.
        damaged: What becomes of a line or row that cannot be read: ``"error"``, or ``"skip"`` (leave it out, count it).
        deduplicate: Leave out documents whose text is that of an earlier one, and count them. This keeps about 100
            bytes a document in memory.
        exclude: Patterns of relative paths inside folders to leave out, as in a shell (``"*/test/*"``; ``*`` also
            matches slashes).

    Raises:
        ValueError: An option has no meaning.
    """

    text_field: str = "text"
    encoding: str = DEFAULT_ENCODING
    undecodable: Literal["error", "skip", "replace"] = "error"
    cut_text: int | None = None
    exclude: tuple[str, ...] = ()
    format: Literal["auto", "text", "jsonl", "csv", "tsv", "parquet"] = "auto"
    damaged: Literal["error", "skip"] = "error"
    deduplicate: bool = False

    def __post_init__(self) -> None:
        self._line_end()
        if self.undecodable not in UNDECODABLE:
            raise ValueError(f"expected undecodable of {', '.join(UNDECODABLE)}, found {self.undecodable!r}")
        for name, known in (("format", FORMAT_NAMES), ("damaged", ("error", "skip"))):
            if getattr(self, name) not in known:
                raise ValueError(f"expected {name} of {', '.join(known)}, found {getattr(self, name)!r}")
        if any(len(pattern) > _LONGEST_PATTERN for pattern in self.exclude):  # long ones of brackets take hours
            raise ValueError(
                f"expected patterns to exclude of at most {_LONGEST_PATTERN} letters, found one of "
                f"{max(map(len, self.exclude))}"
            )
        if self.cut_text is not None and self.cut_text < 0:
            raise ValueError(f"expected cut_text of at least 0 bytes, found {self.cut_text}")
        if self.cut_text and not self.can_cut:
            raise ValueError(
                f"expected an encoding whose line ends are single bytes for cut_text, found {self.encoding}"
            )

    @property
    def can_cut(self) -> bool:
        """Whether text files can be cut at line ends: where these are single bytes."""
        return self._line_end() == b"\n"

    def _line_end(self) -> bytes:
        try:
            return "\n".encode(self.encoding)
        except (LookupError, UnicodeError) as error:
            raise ValueError(f"expected an encoding that Python knows, found {self.encoding!r}") from error


def decoded(raw: bytes | str, options: ReadOptions, origin: str) -> str | None:
    """Text of raw bytes, or of a string that may hold lone surrogates; None when it is to be left out.

    Raises:
        ValueError: The text is undecodable and ``options.undecodable`` is ``"error"``.
    """
    try:
        text = raw.decode(options.encoding) if isinstance(raw, bytes) else raw
        text.encode()
        return text
    except UnicodeError as error:
        return UNDECODABLE[options.undecodable](raw, options, f"{origin}: {_place(error)}")


def _raise(raw: bytes | str, options: ReadOptions, problem: str) -> str | None:
    raise ValueError(
        f"expected text in {options.encoding}, found other bytes in {problem}: {_what_it_begins_like(raw)}give the "
        "right --encoding, or leave such documents out with --undecodable skip (or replace)"
    )


_BEGINNINGS = {
    b"\x1f\x8b": "it begins like a gzip file, whose name has to end in .gz; otherwise ",
    b"PK\x03\x04": "it begins like a zip archive, which has to be unpacked first; otherwise ",
    b"%PDF": "it begins like a PDF, whose text has to be taken out first; otherwise ",
    b"\xff\xfe": "it begins like UTF-16; ",
    b"\xfe\xff": "it begins like UTF-16; ",
}


def _what_it_begins_like(raw: bytes | str) -> str:
    """A hint, where the first bytes are those of a kind of file that people have."""
    start = raw[:4] if isinstance(raw, bytes) else b""
    return next((hint for beginning, hint in _BEGINNINGS.items() if start.startswith(beginning)), "")


def _skip(raw: bytes | str, options: ReadOptions, problem: str) -> str | None:
    return None


def _replace(raw: bytes | str, options: ReadOptions, problem: str) -> str | None:
    text = raw.decode(options.encoding, errors="replace") if isinstance(raw, bytes) else raw
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)


def _place(error: UnicodeError) -> str:
    return f"{error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else "half a surrogate pair"


UNDECODABLE: dict[str, Callable[[bytes | str, ReadOptions, str], str | None]] = {
    "error": _raise,
    "skip": _skip,
    "replace": _replace,
}


def text_of_row(row: dict[str, Any], options: ReadOptions, origin: str) -> str:
    """The text field of a row; empty when it is null.

    Raises:
        ValueError: The row has no such field, or it holds no text.
    """
    if not isinstance(row, dict) or options.text_field not in row:
        found = f"the fields {', '.join(map(str, row))}" if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"expected a field {options.text_field!r} in {origin}, found {found}: name the one that holds the text "
            "with --text-field"
        )
    text = row[options.text_field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"expected text in the field {options.text_field!r} of {origin}, found {type(text).__name__}")
    return text or ""
