"""Long text files become documents: how long, where nobody said it, and where they are cut."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from polysketch.data.splits import SplitRule

# A longer text file is cut, so that memory does not grow with it.
LONGEST_DOCUMENT = 1_000_000  # bytes
# Where files are few they are cut, so that every split gets some documents.
EXPECTED_DOCUMENTS = 20  # in the smallest split
FEW_DOCUMENTS = 4  # a split of whole files is empty with a probability of 2 % where so many are expected
SHORTEST_DOCUMENT, USUAL_DOCUMENT = 100, 20_000  # bytes

# Of the places where files are cut. Work that was begun by another number is not gone on with.
CUTTING = 2

# A line end is not looked for beyond so many bytes after the wanted length, unless that length is more.
LONGEST_SEARCH = 4096


def cut_for(text_files: Sequence[Path], other_documents: bool, rule: SplitRule) -> int:
    """Bytes of the documents that text files are cut into, where the user does not say it.

    Args:
        text_files: Whole files whose splits a hash decides.
        other_documents: Whether there are sources of another kind, whose documents are not known before they are read.
        rule: Shares of the splits.

    Returns:
        A length that gives every split about 20 documents, at most 20,000 bytes, where whole files would leave a split
        empty; else a megabyte.
    """
    shares = [rule.share_of(name) for name in ("validation", "test") if rule.share_of(name) > 0]
    if other_documents or not text_files or not shares or len(text_files) * min(shares) >= FEW_DOCUMENTS:
        return LONGEST_DOCUMENT
    total = sum(path.stat().st_size for path in text_files)
    return min(USUAL_DOCUMENT, max(SHORTEST_DOCUMENT, int(total * min(shares)) // EXPECTED_DOCUMENTS))


def pieces_of_file(file: BinaryIO, size: int, encoding: str) -> Iterator[bytes]:
    """Cut a file after the first line end beyond `size` bytes, or where a line is long at a sensible place in it.

    A line that goes on for longer than `searched_for_line_end` is cut after its first space beyond `size` bytes, or
    between two characters. So memory does not grow with the file. Together the pieces are the file.

    Args:
        file: Open for reading.
        size: Bytes, at least 1.
        encoding: Of the text; one whose line ends are single bytes.
    """
    searched, ahead = searched_for_line_end(size), b""  # what was read ahead holds no line end
    while head := ahead[:size] + file.read(max(0, size - len(ahead))):
        tail = ahead[size:]
        tail += file.readline(searched - len(tail))
        cut = _sensible_cut(head, tail, searched, encoding)
        yield head + tail[:cut]
        ahead = tail[cut:]


def searched_for_line_end(size: int) -> int:
    """Bytes beyond the wanted length over which a line end is looked for.

    Pieces may become so much longer, and yet a split that was to get 20 of them is hardly ever empty.
    """
    longer = EXPECTED_DOCUMENTS // FEW_DOCUMENTS - 1
    return max(size, min(LONGEST_SEARCH, longer * max(size, SHORTEST_DOCUMENT)))


def _sensible_cut(head: bytes, tail: bytes, searched: int, encoding: str) -> int:
    """How much of the bytes that follow belongs to the piece before."""
    if tail.endswith(b"\n") or len(tail) < searched:
        return len(tail)
    space = re.search(rb"[ \t]", tail)
    return _rest_of_character(head, tail, encoding) if space is None else space.end()


def _rest_of_character(head: bytes, tail: bytes, encoding: str) -> int:
    """Bytes that follow and belong to a character that has begun before."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="ignore")
    decoder.decode(head)
    for rest in range(len(tail)):
        begun, _ = decoder.getstate()
        if not begun:
            return rest
        decoder.decode(tail[rest : rest + 1])
    return len(tail)
