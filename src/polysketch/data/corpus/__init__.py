"""Reading text: files, folders and datasets, one document at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from polysketch.data.corpus.document import Document, ReadOptions, decoded
from polysketch.data.corpus.files import SourceFile, source_files
from polysketch.data.corpus.hub import HUB_PREFIX, read_dataset
from polysketch.data.corpus.readers import RawDocument, read_file, read_text
from polysketch.data.splits import SplitRule, SplitTable


class Corpus:
    """The documents of some sources, in a fixed order, readable as often as needed.

    One document (of a Parquet file a few hundred rows) is in memory at a time.

    Attributes:
        skipped: Documents left out in the last pass, by reason: ``empty``, ``undecodable``.
    """

    def __init__(
        self,
        sources: Sequence[str],
        options: ReadOptions,
        rule: SplitRule,
        *,
        table: SplitTable | None = None,
        max_text_bytes: int | None = None,
    ) -> None:
        """Find the files of the sources; nothing is read yet.

        Args:
            sources: Paths of files and folders, and ``hf:NAME[:CONFIG]``.
            options: How they are read.
            rule: The split of documents whose source gives none.
            table: The split of files.
            max_text_bytes: Stop before the document that would exceed this many bytes of text; None reads all.

        Raises:
            FileNotFoundError, ValueError: As ``source_files``; also when there are no sources.
        """
        if not sources:
            raise ValueError("expected at least one source (file, folder or hf:NAME), found none")
        if max_text_bytes is not None and max_text_bytes < 1:
            raise ValueError(f"expected max_text_bytes of at least 1, found {max_text_bytes}")
        self.skipped: Counter[str] = Counter()
        self._options = options
        self._rule = rule
        self._max_text_bytes = max_text_bytes
        self._parts = _without_repeats(
            part
            for source in sources
            for part in ([source] if source.startswith(HUB_PREFIX) else source_files(source, options, table))
        )

    def documents(self) -> Iterator[Document]:
        """All documents, each with its split decided.

        Raises:
            ValueError: A file is damaged or undecodable; there is no text at all.
        """
        self.skipped.clear()
        total = 0
        for raw, split in self._raw_documents():
            document = self._document(raw, split)
            if document is None:
                continue
            total += document.num_bytes
            if self._max_text_bytes is not None and total > self._max_text_bytes:
                self._require_some(total - document.num_bytes, document)
                return
            yield document
        if total == 0:
            raise ValueError(f"expected some text in the sources, found only {self.skipped.total()} empty documents")

    def _require_some(self, num_bytes: int, document: Document) -> None:
        if num_bytes == 0:
            raise ValueError(
                f"expected max_text_bytes that hold a document, found {self._max_text_bytes}, and the first one, "
                f"{document.origin}, has {document.num_bytes} bytes: allow more, or cut long text files with --cut-text"
            )

    def known_bytes(self) -> int | None:
        """Bytes of text, where that can be told without reading: plain text files in UTF-8, not compressed."""
        files = [part for part in self._parts if isinstance(part, SourceFile) and _is_plain(part)]
        if len(files) < len(self._parts) or self._max_text_bytes is not None:
            return None
        return sum(file.path.stat().st_size for file in files)

    def _raw_documents(self) -> Iterator[tuple[RawDocument, str | None]]:
        for part in self._parts:
            if isinstance(part, str):
                yield from read_dataset(part, self._options)
            else:
                yield from ((raw, part.split) for raw in read_file(part.path, part.reader, self._options))

    def _document(self, raw: RawDocument, split: str | None) -> Document | None:
        origin, contents = raw
        if not contents:
            self.skipped["empty"] += 1
            return None
        text = decoded(contents, self._options, origin)
        if text is None:
            self.skipped["undecodable"] += 1
            return None
        return Document(text, len(text.encode()), split or self._rule.split_of(text), origin)


def _without_repeats(parts: Iterator[SourceFile | str]) -> list[SourceFile | str]:
    """Each file once, at its first mention, even when a folder and a file in it are both named."""
    unique = {part if isinstance(part, str) else part.path.resolve(): part for part in parts}
    return list(unique.values())


def _is_plain(file: SourceFile) -> bool:
    return file.reader is read_text and file.path.suffix.lower() != ".gz"


__all__ = ["Corpus", "Document", "ReadOptions", "SourceFile", "source_files"]
