"""A prepared folder, opened: its description, its tokenizer, and its tokens as memory maps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polysketch.data.description import DESCRIPTION_FILE, DataDescription, SplitDescription
from polysketch.data.tokenization import TokenizerLike, described_tokenizer
from polysketch.data.tokens import TokenFile, Tokens, joined, require_size

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Split:
    """One split of a prepared folder.

    Attributes:
        name: ``"train"``, ``"validation"`` or ``"test"``.
        tokens: All ids one after another, uint16 or uint32, num_tokens of them: the read-only memory map of a file, or
            several files that are read as one.
        num_tokens: Number of ids, ends of text included.
        num_documents: Number of documents.
        num_bytes: Bytes of UTF-8 text, ends of text not included.
    """

    name: str
    tokens: Tokens
    num_tokens: int
    num_documents: int
    num_bytes: int


@dataclass(frozen=True)
class PreparedData:
    """A folder made by ``prepare``.

    Attributes:
        folder: Where it is.
        description: What description.json says.
        tokenizer: The tokenizer it was prepared with.
    """

    folder: Path
    description: DataDescription
    tokenizer: TokenizerLike

    @classmethod
    def open(cls, folder: str | Path) -> PreparedData:
        """Open a prepared folder; the sizes of its files and the tokenizer are checked, the tokens not read.

        Raises:
            FileNotFoundError: The folder or one of its files is missing.
            ValueError: The description is damaged, a file was cut short, or the tokenizer is not the one it names.
            ImportError: The extra that the tokenizer needs is missing.
        """
        folder = Path(folder)
        description = read_description(folder)
        return cls(folder, description, described_tokenizer(folder, description.tokenizer))

    def split(self, name: str) -> Split:
        """One split, memory-mapped.

        Raises:
            ValueError: There is no such split.
        """
        split = split_in(self.folder, self.description, name)
        dtype = DTYPES[self.description.dtype]
        files = [TokenFile(self.folder / shard.file, dtype, shard.tokens) for shard in split.shards]
        return Split(name, joined(files), split.tokens, split.documents, split.bytes)

    def verify(self) -> None:
        """Read every token file and compare its sha256 with the description: about a second for 500 MB.

        Raises:
            ValueError: A file differs from what ``prepare`` wrote, if only by one bit.
        """
        for split in self.description.splits.values():
            for shard in split.shards:
                _require_sha256(self.folder / shard.file, shard.sha256)


def read_description(folder: Path) -> DataDescription:
    """What a prepared folder holds; the sizes of its files are checked, the tokenizer is not loaded.

    Raises:
        FileNotFoundError, ValueError: As ``PreparedData.open``, but for the tokenizer.
    """
    description = DataDescription.read(folder / DESCRIPTION_FILE)
    if description.dtype not in DTYPES:
        raise ValueError(f"expected tokens of {' or '.join(DTYPES)} in {folder}, found {description.dtype!r}")
    for name, split in description.splits.items():
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError(f"expected {split.tokens} tokens in the files of {name} in {folder}, found other counts")
        for shard in split.shards:
            require_size(folder / shard.file, shard.tokens * DTYPES[description.dtype].itemsize)
    return description


def split_in(folder: Path, description: DataDescription, name: str) -> SplitDescription:
    """What the description of a folder says about one split.

    Raises:
        ValueError: There is no such split.
    """
    if name not in description.splits:
        raise ValueError(
            f"expected a split of {', '.join(description.splits)} in {folder}, found {name!r}: it may have been "
            "prepared with a share of 0"
        )
    return description.splits[name]


def sha256_of(path: Path) -> str:
    """Of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_sha256(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ValueError(
            f"expected {path} with sha256 {expected[:12]}, found {found[:12]}: the file was altered or "
            "damaged after it was prepared; prepare again"
        )
