"""Long text files become documents: how long, where nobody said it, and where they are cut."""

from __future__ import annotations

import codecs
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

# A line end is looked for over this many bytes beyond the wanted length, or over that length where it is more.
SHORTEST_SEARCH = 4096


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
    """Cut a file after the first line end beyond `size` bytes, or where lines are long at a sensible place before it.

    A line that goes on for as long again (4,096 bytes at least) is cut after its last space, or between two
    characters. So memory does not grow with the file. Together the pieces are the file.

    Args:
        file: Open for reading.
        size: Bytes, at least 1.
        encoding: Of the text; one whose line ends are single bytes.
    """
    searched = max(size, SHORTEST_SEARCH)
    head = file.read(size)
    while head:
        tail = file.readline(searched)
        cut = _sensible_cut(head, tail, searched, encoding)
        yield head + tail[:cut]
        head = tail[cut:] + file.read(max(0, size - len(tail[cut:])))


def _sensible_cut(head: bytes, tail: bytes, searched: int, encoding: str) -> int:
    """How much of the bytes that follow belongs to the piece before."""
    if tail.endswith(b"\n") or len(tail) < searched:
        return len(tail)
    space = max(tail.rfind(b" "), tail.rfind(b"\t"))
    if space >= 0:
        return space + 1
    decoder = codecs.getincrementaldecoder(encoding)(errors="ignore")
    decoder.decode(head + tail)
    begun, _ = decoder.getstate()  # bytes of a character that is not whole yet
    return len(tail) - len(begun)
