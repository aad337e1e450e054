"""Reading text: files, folders and datasets, one document at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from polysketch.data.corpus.cutting import LONGEST_DOCUMENT, cut_for
from polysketch.data.corpus.document import Document, ReadOptions, decoded
from polysketch.data.corpus.hub import NamedDataset, named_dataset, read_dataset
from polysketch.data.corpus.place import BEGINNING, Place
from polysketch.data.corpus.readers import Damaged, RawDocument, read_file, read_text
from polysketch.data.corpus.recipes import RECIPES, Recipe
from polysketch.data.corpus.selection import Selection
from polysketch.data.corpus.source_files import SourceFile, source_files
from polysketch.data.splits import SplitRule, SplitTable

Part = SourceFile | NamedDataset
ALL = Selection()
_MOST_COMPARED = 1_000_000  # documents whose digests are kept only to tell of identical ones: 100 bytes each
_MOST_NAMED = 5


class Corpus:
    """The documents of some sources, in a fixed order, readable as often as needed.

    One document (of a Parquet file a few hundred rows) is in memory at a time.

    Attributes:
        skipped: Documents left out in the last pass, by reason: ``empty``, ``undecodable``, ``damaged``, ``identical``.
        damages: What was wrong with the first damaged ones of them.
        repeated: Where the first documents are whose text is that of an earlier one, whether left out or not; looked
            for among the first million.
        split_by_hash: Whether in the last pass there was a document whose source gave it no split.
        cut_text: Bytes of the documents that text files are cut into; 0 where they are kept whole.
        source_bytes: Bytes of files read in the last pass so far.
    """

    def __init__(
        self,
        sources: Sequence[str],
        options: ReadOptions,
        rule: SplitRule,
        *,
        table: SplitTable | None = None,
        selection: Selection = ALL,
        mirror: Path | None = None,
    ) -> None:
        """Find the files of the sources; nothing is read yet.

        Args:
            sources: Paths of files and folders, names of ``RECIPES``, and ``hf:NAME[:CONFIG]``.
            options: How they are read.
            rule: The split of documents whose source gives none.
            table: The split of files.
            selection: How much of them is read.
            mirror: Folder in which datasets lie under their names on the Hub, to be read instead of the Hub.

        Raises:
            FileNotFoundError, ValueError: As ``source_files`` and ``named_dataset``; also when there are no sources.
        """
        if not sources:
            raise ValueError("expected at least one source (file, folder, dataset or hf:NAME), found none")
        self._digests: set[bytes] = set()
        self._start_at(BEGINNING)
        self._rule = rule
        self._selection = selection
        self._parts = _without_repeats(
            (number, part)
            for number, source in enumerate(sources)
            for part in _parts_of(source, named_dataset(source, mirror), options, table)
        )
        self.cut_text = self._chosen_cut(options) if options.cut_text is None else options.cut_text
        self._options = dataclasses.replace(options, cut_text=self.cut_text)

    def documents(self, start: Place = BEGINNING) -> Iterator[Document]:
        """All documents, each with its split decided.

        Args:
            start: Where to begin, a ``place`` of an earlier pass; parts behind it are not opened.

        Raises:
            ValueError: A file is damaged or undecodable; there is no text at all.
        """
        self._digests.clear()
        if self._options.deduplicate and start != BEGINNING:
            self._read_again(start)
        self._start_at(start)
        limit = self._selection.max_text_bytes
        for raw, split in self._raw_documents(start):
            document = self._document(raw, split)
            if document is None:
                continue
            if limit is not None and self._text_bytes + document.num_bytes > limit:
                self._require_some(self._text_bytes, document)
                return
            self._text_bytes += document.num_bytes
            yield document
        if self._text_bytes == 0:
            raise ValueError(f"expected some text in the sources, found only {self.skipped.total()} empty documents")

    def place(self) -> Place:
        """Where the last pass is: after the document that it gave last."""
        return Place(
            part=self._part,
            section=self._section,
            row=self._row,
            sources=self._sources,
            source_bytes=self.source_bytes,
            text_bytes=self._text_bytes,
            rows=tuple((source, split, count) for (source, split), count in self._rows.items()),
            skipped=dict(self.skipped),
            split_by_hash=self.split_by_hash,
        )

    def still_has(self, place: Place) -> bool:
        """Whether the files up to a place of another corpus are those of this one, by name, size and time."""
        found = ""
        for _, part in self._parts[: place.part + 1]:
            found = _fingerprint(found, part)
        return place.part < len(self._parts) and found == place.sources

    def _start_at(self, place: Place) -> None:
        self._part, self._section, self._row = place.part, place.section, place.row
        self._sources, self.source_bytes = place.sources, place.source_bytes
        self._text_bytes, self.split_by_hash = place.text_bytes, place.split_by_hash
        self._rows = Counter({(source, split): count for source, split, count in place.rows})
        self.skipped = Counter(place.skipped)
        self.damages: list[str] = []
        self.repeated: list[str] = []

    def _require_some(self, num_bytes: int, document: Document) -> None:
        if num_bytes == 0:
            raise ValueError(
                f"expected max_text_bytes that hold a document, found {self._selection.max_text_bytes}, and the first "
                f"one, {document.origin}, has {document.num_bytes} bytes: allow more, or cut long text files with "
                "a smaller --cut-text"
            )

    def _chosen_cut(self, options: ReadOptions) -> int:
        """What is right where the user does not say how text files are cut."""
        if not options.can_cut or self._selection.max_documents is not None:
            return 0
        parts = [part for _, part in self._parts]
        split_elsewhere = all(part.split is not None for part in parts if isinstance(part, SourceFile))
        if split_elsewhere:
            return LONGEST_DOCUMENT
        text = [part.path for part in parts if isinstance(part, SourceFile) and part.reader is read_text]
        return cut_for(text, len(text) < len(parts), self._rule)

    def known_bytes(self) -> int | None:
        """Bytes of all files, compressed ones as they are; None where datasets or limits make that no measure."""
        files = [part for _, part in self._parts if isinstance(part, SourceFile)]
        if len(files) < len(self._parts) or self._selection != ALL:
            return None
        return sum(file.path.stat().st_size for file in files)

    def _raw_documents(self, start: Place) -> Iterator[tuple[RawDocument, str | None]]:
        """What is to be read from `start` on, and whose rows come after those that were read before."""
        for index in range(max(start.part, 0), len(self._parts)):
            self._part, (number, part) = index, self._parts[index]
            begun = index == start.part
            if not begun:
                self._sources = _fingerprint(self._sources, part)
            before = sum(_size(part) for _, part in self._parts[:index]) if begun else self.source_bytes
            self.source_bytes = before
            for section, (split, raws) in enumerate(self._read(part)):
                if begun and section < start.section:
                    continue
                self._section, self._row = section, start.row if begun and section == start.section else 0
                for raw in itertools.islice(raws, self._row, self._stop(number, split)):
                    self._row += 1
                    self._rows[number, split] += 1
                    yield raw, split
            self.source_bytes = before + _size(part)

    def _stop(self, number: int, split: str | None) -> int | None:
        """The row before which to stop: how many rows were passed over, and how many may be read of the source."""
        if self._selection.max_documents is None:
            return None
        return self._row + self._selection.max_documents - self._rows[number, split]

    def _read(self, part: Part) -> Iterable[tuple[str | None, Iterator[RawDocument]]]:
        """The documents of one part, by the splits its source gives; a file that is not wanted is not opened."""
        if isinstance(part, NamedDataset):
            return read_dataset(part, self._options, self._selection.splits)
        if part.split is not None and not self._selection.keeps(part.split):
            return []
        return [(part.split, read_file(part.path, part.reader, self._options, self._count))]

    def _count(self, amount: int) -> None:
        self.source_bytes += amount

    def _read_again(self, stop: Place) -> None:
        """Find the texts up to a place, to know them when they come again."""
        self._start_at(BEGINNING)
        for raw, split in self._raw_documents(BEGINNING):
            if (self._part, self._section, self._row) > (stop.part, stop.section, stop.row):
                return
            self._document(raw, split)

    def _is_repeated(self, text: str, origin: str) -> bool:
        """Whether an earlier document has the same text."""
        if not self._options.deduplicate and len(self._digests) >= _MOST_COMPARED:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._digests:
            if len(self.repeated) < _MOST_NAMED:
                self.repeated.append(origin)
            return True
        self._digests.add(digest)
        return False

    def _document(self, raw: RawDocument, split: str | None) -> Document | None:
        origin, contents = raw
        if isinstance(contents, Damaged):
            self.skipped["damaged"] += 1
            if len(self.damages) < _MOST_NAMED:
                self.damages.append(contents.reason)
            return None
        if not contents:
            self.skipped["empty"] += 1
            return None
        text = decoded(contents, self._options, origin)
        if text is None:
            self.skipped["undecodable"] += 1
            return None
        if self._is_repeated(text, origin) and self._options.deduplicate:
            self.skipped["identical"] += 1
            return None
        self.split_by_hash |= split is None
        split = split or self._rule.split_of(text)
        return Document(text, len(text.encode()), split, origin) if self._selection.keeps(split) else None


def _parts_of(
    source: str, dataset: NamedDataset | None, options: ReadOptions, table: SplitTable | None
) -> Sequence[Part]:
    return source_files(source, options, table) if dataset is None else [dataset]


def _without_repeats(parts: Iterator[tuple[int, Part]]) -> list[tuple[int, Part]]:
    """Each file once, at its first mention, even when a folder and a file in it are both named."""
    unique: dict[Path | NamedDataset, tuple[int, Part]] = {}
    for number, part in parts:
        unique.setdefault(part.path.resolve() if isinstance(part, SourceFile) else part, (number, part))
    return list(unique.values())


def _size(part: Part) -> int:
    return part.path.stat().st_size if isinstance(part, SourceFile) else 0


def _fingerprint(before: str, part: Part) -> str:
    """Of a part and all before it; equal while its file was not written to."""
    if isinstance(part, SourceFile):
        found = part.path.stat()
        name = f"{part.path}\n{part.split}\n{found.st_size}\n{found.st_mtime_ns}"
    else:
        name = repr(part)
    # Names of files may be no UTF-8.
    return hashlib.sha256(f"{before}\n{name}".encode(errors="surrogateescape")).hexdigest()


__all__ = [
    "BEGINNING",
    "RECIPES",
    "Corpus",
    "Document",
    "Place",
    "ReadOptions",
    "Recipe",
    "Selection",
    "SourceFile",
    "source_files",
]
