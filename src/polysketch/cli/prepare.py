"""``polysketch prepare``: text into a folder of tokens that training and evaluation read."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polysketch.cli.next_command import next_command
from polysketch.cli.standard_input import standard_input_kept
from polysketch.cli.usual_folders import prepared_folder

if TYPE_CHECKING:
    from polysketch.data import PreparedData


@dataclass(frozen=True)
class PrepareFlags:
    """Turn text into a folder of tokens, with a tokenizer and a train/validation/test split.

    A SOURCE is a file, a folder, a dataset, or - for standard input. A folder is searched for text, code, .jsonl, .csv,
    .tsv and .parquet files; .gz is read through. A dataset of the Hugging Face Hub is downloaded as it is read: pg19,
    wiki40b, c4, fineweb-edu, or hf:NAME or hf:NAME:CONFIG. Every document (a file, a line of JSON, a row of a table)
    ends with an end-of-text token.

    The split of a document comes from --split-table. Without one it comes from subfolders train, validation and test of
    its source, or from the splits of its dataset. Where none of these says it, a hash of --seed and the text decides.

    Examples:
      polysketch prepare mybook.txt
      polysketch prepare books/ --tokenizer bpe:8192 --out data/books
      polysketch prepare pg19 --splits test --tokenizer data/books --out data/pg19
    """

    source: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE...")]
    """Files, folders, -, pg19, wiki40b, c4, fineweb-edu, and hf:NAME[:CONFIG]."""

    out: Path | None = None
    """Folder to make. Default: data/NAME, with the name of the only SOURCE. It appears when everything is written.
    Until then OUT.partial holds what is done: after a kill, Ctrl-C or a full disk the same command goes on from the
    last half minute, and gives the same bytes."""

    tokenizer: str = "bytes"
    """A tokenizer to train: bytes, bpe:N or sentencepiece:N, with N ids. Or the path of one: a tokenizer.json, GPT-2's
    encoder.json, a sentencepiece .model, or a folder of a transformers model, a run or prepared data."""

    end_of_text: str | None = None
    """Token that ends a document, for a tokenizer from a file. Default: what its folder or a usual name says."""

    validation_share: float = 0.05
    """Share of the documents for validation where the hash decides; 0 for no such split."""

    test_share: float = 0.05
    """Share of the documents for test where the hash decides; 0 for no such split."""

    split_table: Path | None = None
    """Tab-separated file with columns file (relative to the table) and split (train, validation or test)."""

    seed: int = 0
    """Seed of the split."""

    text_field: str = "text"
    """Field of JSON lines, column of tables (.csv, .tsv, .parquet), or feature of datasets that holds the text."""

    encoding: str = "utf-8"
    """Encoding of text files and JSON lines."""

    undecodable: Literal["error", "skip", "replace"] = "error"
    """What to do with documents that are not in that encoding. The summary counts skipped ones."""

    format: Literal["auto", "text", "jsonl", "csv", "tsv", "parquet"] = "auto"
    """What files hold, whatever their names end with. auto: what their names say."""

    skip_bad: bool = False
    """Leave out lines and rows that cannot be read. They are counted, and the first ones are named."""

    deduplicate: bool = False
    """Leave out documents whose text is exactly that of an earlier one. They are counted."""

    cut_text: int | None = None
    """Cut text files into documents of about this many bytes, at line ends, and long lines at a space; 0 keeps them
    whole. Default: few files are cut so that every split gets some text, and all files into documents of at most a
    megabyte."""

    exclude: tuple[str, ...] = ()
    """Patterns of paths inside folders to leave out, for instance '*/test/*'."""

    max_text_bytes: int | None = None
    """Stop after this much text."""

    max_documents: int | None = None
    """Read at most this many documents of each source, and of each split that a source comes in."""

    splits: tuple[Literal["train", "validation", "test"], ...] | None = None
    """Keep only documents of these splits. Other splits of a dataset are not downloaded."""

    mirror: Path | None = None
    """Folder to read instead of the Hub. Datasets lie in it under their names on the Hub (DIR/allenai/c4)."""

    tokenizer_text_bytes: int = 500_000_000
    """Train the tokenizer on at most this much text."""

    shard_tokens: int = 100_000_000
    """Most tokens of a file. A split of more is in several files, which are read as one."""

    workers: int | None = None
    """Processes that turn text into tokens, while this one reads and writes. Default: 1; with --ray all cores of the
    cluster. The result is the same, byte for byte."""

    ray: bool = False
    """Turn text into tokens on the machines of a cluster of Ray: that of RAY_ADDRESS, or one started on this machine.
    Only this machine needs the text and the disk."""

    progress: bool = True
    """Show a progress bar."""

    json: bool = False
    """Print the summary as one JSON object on the last line."""


def run(flags: PrepareFlags) -> int:
    """Prepare the data and print a summary.

    Args:
        flags: The command line.

    Returns:
        Exit status 0.

    Raises:
        ValueError, OSError, RuntimeError, ImportError: As ``polysketch.data.prepare``.
    """
    from polysketch.data import ReadOptions, prepare

    started = time.perf_counter()
    out = flags.out or prepared_folder(flags.source)
    with standard_input_kept(flags.source, out, flags.format) as sources:
        data = prepare(
            sources,
            flags.tokenizer,
            out,
            validation_share=flags.validation_share,
            test_share=flags.test_share,
            seed=flags.seed,
            split_table=flags.split_table,
            options=ReadOptions(
                flags.text_field,
                flags.encoding,
                flags.undecodable,
                flags.cut_text,
                flags.exclude,
                format=flags.format,
                damaged="skip" if flags.skip_bad else "error",
                deduplicate=flags.deduplicate,
            ),
            max_text_bytes=flags.max_text_bytes,
            max_documents=flags.max_documents,
            splits=flags.splits,
            mirror=flags.mirror,
            tokenizer_text_bytes=flags.tokenizer_text_bytes,
            end_of_text=flags.end_of_text,
            shard_tokens=flags.shard_tokens,
            workers=flags.workers,
            ray=flags.ray,
            progress=flags.progress,
            say=_say,
        )
    for line in summary_lines(data, time.perf_counter() - started):
        print(line)
    if flags.json:
        print(json.dumps({"out": str(data.folder), **data.description.to_dict()}))
    return 0


def _say(text: str) -> None:
    """Print a line that may name a file whose name is not text in any encoding."""
    print(text.encode(errors="backslashreplace").decode())


def summary_lines(data: PreparedData, seconds: float) -> list[str]:
    """What a person wants to know about a prepared folder: a line for each split, and anything unusual."""
    description = data.description
    total = sum(split.bytes for split in description.splits.values())
    lines = [
        f"{'split':<12}{'documents':>12}{'tokens':>16}{'text bytes':>16}{'bytes/token':>13}",
        *(
            f"{name:<12}{split.documents:>12,}{split.tokens:>16,}{split.bytes:>16,}{split.bytes / split.tokens:>13.3f}"
            for name, split in description.splits.items()
        ),
        f"tokenizer {description.tokenizer.name} ({description.vocab_size:,} ids), tokens as {description.dtype}, "
        f"{total / 1e6:.1f} MB of text in {seconds:.1f} s ({total / 1e6 / seconds:.1f} MB/s)",
    ]
    lines += [f"left out: {count:,} {reason} documents" for reason, count in description.skipped.items()]
    if not description.tokenizer.lossless:
        lines.append("note: this tokenizer does not keep all text; bits per byte count what it keeps")
    return [*lines, f"prepared {data.folder}", *_next_lines(data)]


def _next_lines(data: PreparedData) -> list[str]:
    """The command that trains on the data, if there is something to train on."""
    splits = data.description.splits
    if "train" not in splits:
        return []
    words = ("train", "--data", data.folder, "--preset", "tiny", "--out", f"runs/{data.folder.name}")
    return [next_command(*words, *(() if "validation" in splits else ("--eval-every", "0")))]
