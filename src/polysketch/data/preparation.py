"""From text to a prepared folder: train the tokenizer, encode, split, write."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from polysketch.data.corpus import BEGINNING, Corpus, Document, Place, ReadOptions, Selection
from polysketch.data.corpus.cutting import LONGEST_DOCUMENT
from polysketch.data.description import (
    DESCRIPTION_FILE,
    RECORD_FILE,
    SPLITS,
    DataDescription,
    SplitDescription,
    TokenizerDescription,
)
from polysketch.data.encoding import batches
from polysketch.data.prepared import PreparedData
from polysketch.data.ray_workers import ray_workers
from polysketch.data.splits import SplitRule, SplitTable
from polysketch.data.tokenization import (
    TokenizerLike,
    build_tokenizer,
    described_tokenizer,
    load_tokenizer,
    parse_specification,
)
from polysketch.data.unfinished import Keeper, Record, read_record
from polysketch.data.workers import EncodeInOrder, encoding_workers
from polysketch.data.writer import SplitWriter, token_dtype
from polysketch.progress import Progress
from polysketch.storage import whole_folder
from polysketch.storage.sums import sha256_of

# 200 MB of uint16: few files, and little to copy again when one is damaged.
SHARD_TOKENS = 100_000_000


def prepare(
    sources: str | Path | Sequence[str | Path],
    tokenizer: str | Path | TokenizerLike,
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
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    ray: bool = False,
    progress: bool = True,
    say: Callable[[str], None] | None = None,
) -> PreparedData:
    """Turn text into memory-mapped tokens with a tokenizer, a split and a description.

    Each document, in the order of the sources, is encoded and ended with an end-of-text token. Its split comes from the
    split table, else from the split subfolders or splits of its source, else from a hash of the seed and its text. A
    tokenizer that is trained sees the training split only. The same sources and arguments give the same files, byte for
    byte, with any number of workers. Memory is bounded by the longest document, twice a batch of 4 MB for each worker,
    and what training the tokenizer needs.

    Twice a minute it is recorded in ``OUT.partial`` how far the work is. However it ends before it is whole, the same
    call goes on from there and gives the same bytes as if nothing had happened. Nothing is kept where a split is empty.

    Text files are cut where there are so few that a split would be empty, or where they are longer than a megabyte;
    ``ReadOptions.cut_text`` says it otherwise.

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
        shard_tokens: Most tokens of a file. A split of more is in several, a document perhaps in two of them.
        workers: Processes that encode, while this one reads and writes; None for one. With more than one, a program
            that calls this needs ``if __name__ == "__main__":``, as for every use of ``multiprocessing``.
        ray: Encode on the machines of a cluster of Ray (extra ``ray``), see ``polysketch.data.ray_workers``;
            ``workers`` is then the number of cores to use, None for all.
        progress: Show a progress bar on standard error.
        say: Called with a line for what is decided here and not by the arguments.

    Returns:
        The prepared folder, opened.

    Raises:
        FileNotFoundError: A source, the table or the tokenizer file is missing.
        FileExistsError: ``out`` holds something, or ``OUT.partial`` what another call left unfinished.
        ValueError: A source is empty, damaged or undecodable, or a split is empty.
        RuntimeError: The workers end again and again.
        OSError: The disk is full.
        ImportError: An extra is missing.
    """
    _require_positive(
        tokenizer_text_bytes=tokenizer_text_bytes, shard_tokens=shard_tokens, workers=1 if workers is None else workers
    )
    names = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    rule = SplitRule(validation_share, test_share, seed)
    table = None if split_table is None else SplitTable(split_table)
    selection = Selection(max_text_bytes, max_documents, None if splits is None else tuple(splits))
    options = options or ReadOptions()
    place = None if mirror is None else Path(mirror)
    tokenizer = _known(str(tokenizer) if isinstance(tokenizer, Path) else tokenizer, end_of_text, splits)
    job = {
        "sources": names,
        "shares": asdict(rule),
        "options": {name: value for name, value in asdict(options).items() if name != "cut_text"},
        "selection": asdict(selection),
        "split_table": None if table is None else sha256_of(table.path),
        "mirror": None if mirror is None else str(mirror),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.sha256,
        "tokenizer_text_bytes": tokenizer_text_bytes,
        "shard_tokens": shard_tokens,
    }
    with whole_folder(Path(out), record=RECORD_FILE) as folder:
        corpus = Corpus(names, options, rule, table=table, selection=selection, mirror=place)
        # What the sizes of all files decided, if no option did: files that were not read yet may have changed since.
        job["cut_text"] = corpus.cut_text
        if say is not None and options.cut_text is None:
            _say_how_it_is_cut(corpus.cut_text, say)
        record = read_record(folder, job, corpus)
        if isinstance(tokenizer, str):
            texts = _TrainingTexts(corpus, tokenizer_text_bytes, progress)
            tokenizer = _trained(tokenizer, texts) if record is None else described_tokenizer(folder, record.tokenizer)
        if record is None:
            tokenizer.save(folder)
        described = TokenizerDescription.of(tokenizer)
        keeper = Keeper(folder, job, described)
        work = _Work(folder, corpus, tokenizer, keeper, progress)
        writers = work.written(shard_tokens, record, workers=workers, ray=ray)
        kept = _finished(writers, _wanted_splits(corpus, rule, selection), rule, keeper)
        if say is not None:
            _say_what_was_found(corpus, say)
            _say_how_many_ids(str(job["tokenizer"]), tokenizer.vocab_size, say)
        dtype = token_dtype(tokenizer.vocab_size).name
        description = DataDescription(described, dtype, kept, tuple(names), seed, dict(corpus.skipped))
        description.write(folder / DESCRIPTION_FILE)
    return PreparedData.open(out)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"expected {name} of at least 1, found {value}")


def _say_how_it_is_cut(size: int, say: Callable[[str], None]) -> None:
    if 0 < size < LONGEST_DOCUMENT:
        say(f"few files: their text is cut into documents of about {size:,} bytes; --cut-text 0 keeps files whole")


def _say_how_many_ids(asked: str, found: int, say: Callable[[str], None]) -> None:
    _, colon, wanted = asked.partition(":")  # none in the digest that stands for a tokenizer from a file
    if colon and found < int(wanted):
        say(f"{asked}: the text gave no more than {found:,} ids; more text gives more")


def _say_what_was_found(corpus: Corpus, say: Callable[[str], None]) -> None:
    for reason in corpus.damages:
        say(f"left out: {reason}")
    if corpus.repeated and not corpus.skipped["identical"]:
        named = ", ".join(corpus.repeated)
        say(f"identical to earlier documents: {named}, perhaps others; --deduplicate leaves such out")


def _known(
    tokenizer: str | TokenizerLike, end_of_text: str | None, splits: Sequence[str] | None
) -> str | TokenizerLike:
    """The tokenizer, or the specification of one that is to be trained; a misspelling shows before anything is read."""
    if not isinstance(tokenizer, str):
        return tokenizer
    kind, _ = parse_specification(tokenizer, end_of_text)
    _require_text_to_train_on(tokenizer, kind, splits)
    return load_tokenizer(tokenizer, end_of_text) if kind is None else tokenizer


def _trained(specification: str, texts: _TrainingTexts) -> TokenizerLike:
    return build_tokenizer(specification, lambda: texts)


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
        with Progress("reading for the tokenizer", unit="bytes", enabled=self._progress) as bar:
            for document in documents:
                total += document.num_bytes
                bar.advance(document.num_bytes)
                yield document.text
                if total >= self._max_bytes:
                    return


@dataclass(frozen=True)
class _Work:
    """The way from a corpus to files of tokens.

    Attributes:
        folder: Where the files go.
        corpus: What is read.
        tokenizer: What encodes it.
        keeper: What records how far the work is.
        progress: Whether to show a bar.
    """

    folder: Path
    corpus: Corpus
    tokenizer: TokenizerLike
    keeper: Keeper
    progress: bool

    def written(
        self, shard_tokens: int, record: Record | None, *, workers: int | None, ray: bool
    ) -> dict[str, SplitWriter]:
        """Closed writers of all splits, which hold the corpus; goes on where a record says that some is written."""
        with contextlib.ExitStack() as opened:
            encoders = ray_workers if ray else encoding_workers
            encode = opened.enter_context(encoders(self.tokenizer, workers))
            dtype, known = token_dtype(self.tokenizer.vocab_size), {} if record is None else record.splits
            writers = {name: SplitWriter(self.folder, name, dtype, shard_tokens, known.get(name)) for name in SPLITS}
            for writer in writers.values():
                opened.callback(writer.close)
            self._write(encode, writers, BEGINNING if record is None else record.place)
        return writers

    def _write(self, encode: EncodeInOrder, writers: dict[str, SplitWriter], start: Place) -> None:
        total = self.corpus.known_bytes()
        measure: Callable[[Place], int] = attrgetter("text_bytes" if total is None else "source_bytes")
        done = measure(start)
        with Progress("preparing", total, "bytes", enabled=self.progress, done=done) as bar:
            for batch, encoded in encode(batches(self.corpus, start)):
                for name, part in encoded.items():
                    writers[name].write(part.tokens, part.documents, part.bytes)
                self.keeper.keep(batch.place, writers)
                bar.update(measure(batch.place))
            bar.update(measure(self.corpus.place()))


def _wanted_splits(corpus: Corpus, rule: SplitRule, selection: Selection) -> set[str]:
    """The splits that must not be empty: those asked for; else training, and where the hash decides, every share."""
    if selection.splits is not None:
        return set(selection.splits)
    return {"train", *(name for name in SPLITS if corpus.split_by_hash and rule.share_of(name) > 0)}


def _finished(
    writers: dict[str, SplitWriter], wanted: set[str], rule: SplitRule, keeper: Keeper
) -> dict[str, SplitDescription]:
    """The splits that have documents; refuses an empty one that somebody asked for."""
    total = sum(writer.documents for writer in writers.values())
    for name in [name for name, writer in writers.items() if writer.documents == 0 and name in wanted]:
        keeper.drop()  # other shares are a remedy, and a command with others is refused while there is a record
        raise ValueError(_empty_split(name, rule.share_of(name), str(total)))
    return {name: writer.finish() for name, writer in writers.items() if writer.documents}


def _require_text_to_train_on(tokenizer: str, kind: str | None, splits: Sequence[str] | None) -> None:
    if kind not in (None, "bytes") and splits is not None and "train" not in splits:
        raise ValueError(
            f"expected the training split among the splits, for {tokenizer} is trained on it, found "
            f"{', '.join(splits)}: name the folder of the training data as --tokenizer"
        )


def _empty_split(name: str, share: float, total: str) -> str:
    without = "" if name == "train" else f"; --{name}-share 0 does without the split"
    return (
        f"expected documents in every split, found none of {total} in {name} (share {share:g}): give more text, "
        f"other shares or another --seed, or cut text files into more documents with a smaller --cut-text{without}"
    )
