"""Reading text: files, folders and datasets, one document at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from polysketch.data.corpus.document import Document, ReadOptions, decoded
from polysketch.data.corpus.hub import NamedDataset, named_dataset, read_dataset
from polysketch.data.corpus.readers import RawDocument, read_file, read_text
from polysketch.data.corpus.recipes import RECIPES, Recipe
from polysketch.data.corpus.selection import Selection
from polysketch.data.corpus.source_files import SourceFile, source_files
from polysketch.data.splits import SplitRule, SplitTable

Part = SourceFile | NamedDataset
ALL = Selection()


class Corpus:
    """The documents of some sources, in a fixed order, readable as often as needed.

    One document (of a Parquet file a few hundred rows) is in memory at a time.

    Attributes:
        skipped: Documents left out in the last pass, by reason: ``empty``, ``undecodable``.
        split_by_hash: Whether in the last pass there was a document whose source gave it no split.
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
        self.skipped: Counter[str] = Counter()
        self.split_by_hash = False
        self._options = options
        self._rule = rule
        self._selection = selection
        self._parts = _without_repeats(
            (number, part)
            for number, source in enumerate(sources)
            for part in _parts_of(source, named_dataset(source, mirror), options, table)
        )

    def documents(self) -> Iterator[Document]:
        """All documents, each with its split decided.

        Raises:
            ValueError: A file is damaged or undecodable; there is no text at all.
        """
        self.skipped.clear()
        self.split_by_hash = False
        total, limit = 0, self._selection.max_text_bytes
        for raw, split in self._raw_documents():
            document = self._document(raw, split)
            if document is None:
                continue
            total += document.num_bytes
            if limit is not None and total > limit:
                self._require_some(total - document.num_bytes, document)
                return
            yield document
        if total == 0:
            raise ValueError(f"expected some text in the sources, found only {self.skipped.total()} empty documents")

    def _require_some(self, num_bytes: int, document: Document) -> None:
        if num_bytes == 0:
            raise ValueError(
                f"expected max_text_bytes that hold a document, found {self._selection.max_text_bytes}, and the first "
                f"one, {document.origin}, has {document.num_bytes} bytes: allow more, or cut long text files with "
                "--cut-text"
            )

    def known_bytes(self) -> int | None:
        """Bytes of text, where that can be told without reading: plain text files in UTF-8, not compressed."""
        files = [part for _, part in self._parts if isinstance(part, SourceFile) and _is_plain(part)]
        if len(files) < len(self._parts) or self._selection != ALL:
            return None
        return sum(file.path.stat().st_size for file in files)

    def _raw_documents(self) -> Iterator[tuple[RawDocument, str | None]]:
        read: Counter[tuple[int, str | None]] = Counter()
        for number, part in self._parts:
            for split, raws in self._read(part):
                for raw in itertools.islice(raws, self._left(read[number, split])):
                    read[number, split] += 1
                    yield raw, split

    def _read(self, part: Part) -> Iterable[tuple[str | None, Iterator[RawDocument]]]:
        """The documents of one part, by the splits its source gives; a file that is not wanted is not opened."""
        if isinstance(part, NamedDataset):
            return read_dataset(part, self._options, self._selection.splits)
        if part.split is not None and not self._selection.keeps(part.split):
            return []
        return [(part.split, read_file(part.path, part.reader, self._options))]

    def _left(self, read: int) -> int | None:
        """How many documents may still be read of a source's split."""
        return None if self._selection.max_documents is None else self._selection.max_documents - read

    def _document(self, raw: RawDocument, split: str | None) -> Document | None:
        origin, contents = raw
        if not contents:
            self.skipped["empty"] += 1
            return None
        text = decoded(contents, self._options, origin)
        if text is None:
            self.skipped["undecodable"] += 1
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


def _is_plain(file: SourceFile) -> bool:
    return file.reader is read_text and file.path.suffix.lower() != ".gz"


__all__ = ["RECIPES", "Corpus", "Document", "ReadOptions", "Recipe", "Selection", "SourceFile", "source_files"]
