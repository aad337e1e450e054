"""From text to a prepared folder: train the tokenizer, encode, split, write."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from polysketch.data.corpus import Corpus, Document, ReadOptions, Selection
from polysketch.data.description import (
    DESCRIPTION_FILE,
    SPLITS,
    DataDescription,
    SplitDescription,
    TokenizerDescription,
)
from polysketch.data.prepared import PreparedData
from polysketch.data.progress import byte_progress
from polysketch.data.splits import SplitRule, SplitTable
from polysketch.data.tokenization import TokenizerLike, build_tokenizer, parse_specification
from polysketch.data.writer import SplitWriter, token_dtype
from polysketch.storage import whole_folder

# Text encoded in one call: enough to keep all cores busy, little enough that memory stays small.
BATCH_BYTES = 4_000_000
BATCH_DOCUMENTS = 4096


def prepare(
    sources: str | Path | Sequence[str | Path],
    tokenizer: str | TokenizerLike,
    out: str | Path,
    *,
    validation_share: float = 0.05,
    test_share: float = 0.05,
    seed: int = 0,
    split_table: str | Path | None = None,
    options: ReadOptions | None = None,
    max_text_bytes: int | None = None,
    max_documents: int | None = None,
    splits: Sequence[str] | None = None,
    mirror: str | Path | None = None,
    tokenizer_text_bytes: int = 500_000_000,
    end_of_text: str | None = None,
    progress: bool = True,
) -> PreparedData:
    """Turn text into memory-mapped tokens with a tokenizer, a split and a description.

    Each document, in the order of the sources, is encoded and ended with an end-of-text token. Its split comes from the
    split table, else from the split subfolders or splits of its source, else from a hash of the seed and its text. A
    tokenizer that is trained sees the training split only. The same sources and arguments give the same files, byte for
    byte. Memory is bounded by the longest document, twice a batch of 4 MB, and what training the tokenizer needs.

    Args:
        sources: Files, folders, names of ``polysketch.data.corpus.RECIPES`` such as ``pg19``, and ``hf:NAME[:CONFIG]``.
            What is named is streamed from the Hugging Face Hub, twice where a tokenizer is trained.
        tokenizer: ``bytes``, ``bpe:N``, ``sentencepiece:N``, a path (``polysketch.data.tokenization``), or a tokenizer.
        out: The folder to make; new or empty. It appears only when everything is written and synced.
        validation_share: Expected share of documents for validation where a hash decides; 0 allows there to be none.
        test_share: Likewise for test.
        seed: Seed of that hash.
        split_table: Tab-separated file with columns ``file`` and ``split`` that splits the files.
        options: How sources are read.
        max_text_bytes: Stop after this much text.
        max_documents: Read at most this many documents of each source, and of each split that a source comes in.
        splits: Keep only documents of these splits; None keeps all.
        mirror: Folder in which datasets lie under their names on the Hub (``DIR/allenai/c4``), read instead of the Hub.
        tokenizer_text_bytes: Train the tokenizer on at most this much text, from the beginning.
        end_of_text: The token of a tokenizer file that ends a document; None for the one its folder declares, or the
            one of a usual name.
        progress: Show a progress bar on standard error.

    Returns:
        The prepared folder, opened.

    Raises:
        FileNotFoundError: A source, the table or the tokenizer file is missing.
        FileExistsError: ``out`` holds something.
        ValueError: A source is empty, damaged or undecodable, or a split is empty.
        OSError: The disk is full.
        ImportError: An extra is missing.
    """
    if tokenizer_text_bytes < 1:
        raise ValueError(f"expected tokenizer_text_bytes of at least 1, found {tokenizer_text_bytes}")
    names = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    rule = SplitRule(validation_share, test_share, seed)
    table = None if split_table is None else SplitTable(split_table)
    if isinstance(tokenizer, str):
        kind, _ = parse_specification(tokenizer, end_of_text)  # a misspelling shows before anything is read
        _require_text_to_train_on(tokenizer, kind, splits)
    with whole_folder(Path(out)) as folder:
        selection = Selection(max_text_bytes, max_documents, None if splits is None else tuple(splits))
        place = None if mirror is None else Path(mirror)
        corpus = Corpus(names, options or ReadOptions(), rule, table=table, selection=selection, mirror=place)
        if isinstance(tokenizer, str):
            texts = _TrainingTexts(corpus, tokenizer_text_bytes, progress)
            tokenizer = build_tokenizer(tokenizer, lambda: texts, end_of_text)
        written = _write_tokens(corpus, tokenizer, folder, rule, selection, progress)
        described = _describe_tokenizer(tokenizer, tokenizer.save(folder))
        dtype = token_dtype(tokenizer.vocab_size).name
        description = DataDescription(described, dtype, written, tuple(names), seed, dict(corpus.skipped))
        description.write(folder / DESCRIPTION_FILE)
    return PreparedData.open(out)


class _TrainingTexts:
    """The texts of the training split, with a progress bar; refuses to be empty."""

    def __init__(self, corpus: Corpus, max_bytes: int, progress: bool) -> None:
        self._corpus = corpus
        self._max_bytes = max_bytes
        self._progress = progress

    def __iter__(self) -> Iterator[str]:
        documents = (document for document in self._corpus.documents() if document.split == "train")
        # Checked here: the libraries would turn an error from inside their loop into one of their own.
        first = next(documents, None)
        if first is None:
            raise ValueError(_empty_split("train", 0.0, "all"))
        return self._shown(itertools.chain([first], documents))

    def _shown(self, documents: Iterable[Document]) -> Iterator[str]:
        total = 0
        with byte_progress("reading for the tokenizer", None, enabled=self._progress) as bar:
            for document in documents:
                total += document.num_bytes
                bar.update(document.num_bytes)
                yield document.text
                if total >= self._max_bytes:
                    return


def _write_tokens(
    corpus: Corpus, tokenizer: TokenizerLike, folder: Path, rule: SplitRule, selection: Selection, progress: bool
) -> dict[str, SplitDescription]:
    dtype = token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as open_files:
        writers = {name: SplitWriter(folder / f"{name}.bin", dtype, tokenizer.end_of_text) for name in SPLITS}
        for writer in writers.values():
            open_files.callback(writer.close)
        bar = open_files.enter_context(byte_progress("preparing", corpus.known_bytes(), enabled=progress))
        encode = _Encoder(tokenizer)
        for batch in _batches(corpus.documents()):
            for document, ids in zip(batch, encode(batch), strict=True):
                writers[document.split or "train"].write(ids, document.num_bytes)
                bar.update(document.num_bytes)
    _drop_empty(writers, _wanted_splits(corpus, rule, selection), rule)
    return {name: writer.description() for name, writer in writers.items()}


class _Encoder:
    """Encodes documents and checks that no byte got lost, where the tokenizer promises that."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes()

    def __call__(self, batch: list[Document]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch([document.text for document in batch])
        if self._tokenizer.lossless:
            for document, ids in zip(batch, encoded, strict=True):
                self._require_all_bytes(document, ids)
        return encoded

    def _require_all_bytes(self, document: Document, ids: list[int]) -> None:
        found = int(self._token_bytes[np.asarray(ids, dtype=np.int64)].sum())
        if found != document.num_bytes:
            raise ValueError(
                f"expected tokens for {document.num_bytes} bytes of {document.origin}, found tokens for {found}: the "
                f"tokenizer {self._tokenizer.name} does not keep all of this text"
            )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _wanted_splits(corpus: Corpus, rule: SplitRule, selection: Selection) -> set[str]:
    """The splits that must not be empty: those asked for; else training, and where the hash decides, every share."""
    if selection.splits is not None:
        return set(selection.splits)
    return {"train", *(name for name in SPLITS if corpus.split_by_hash and rule.share_of(name) > 0)}


def _drop_empty(writers: dict[str, SplitWriter], wanted: set[str], rule: SplitRule) -> None:
    """Remove the splits that nobody asked for; refuse an empty one that somebody did."""
    total = sum(writer.documents for writer in writers.values())
    for name in [name for name, writer in writers.items() if writer.documents == 0]:
        if name in wanted:
            raise ValueError(_empty_split(name, rule.share_of(name), str(total)))
        writers.pop(name).path.unlink()


def _require_text_to_train_on(tokenizer: str, kind: str | None, splits: Sequence[str] | None) -> None:
    if kind not in (None, "bytes") and splits is not None and "train" not in splits:
        raise ValueError(
            f"expected the training split among the splits, for {tokenizer} is trained on it, found "
            f"{', '.join(splits)}: name the folder of the training data as --tokenizer"
        )


def _empty_split(name: str, share: float, total: str) -> str:
    without = "" if name == "train" else f"; --{name}-share 0 does without the split"
    return (
        f"expected documents in every split, found none of {total} in {name} (share {share:g}): give more documents, "
        f"other shares or another --seed, or cut long text files into more with --cut-text 20000{without}"
    )


def _describe_tokenizer(tokenizer: TokenizerLike, file: Path | None) -> TokenizerDescription:
    return TokenizerDescription(
        kind=tokenizer.kind,
        name=tokenizer.name,
        file=None if file is None else file.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        lossless=tokenizer.lossless,
    )
