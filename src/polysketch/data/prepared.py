"""A prepared folder, or token files of others, opened: description, tokenizer, and tokens as memory maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polysketch.data.compared_files import is_compared, remember
from polysketch.data.description import (
    DESCRIPTION_FILE,
    RECORD_FILE,
    DataDescription,
    ShardDescription,
    SplitDescription,
)
from polysketch.data.foreign import read_foreign
from polysketch.data.layouts import holds_foreign_files, read_layout
from polysketch.data.tokenization import TokenizerLike, described_tokenizer
from polysketch.data.tokens import ShardedTokens, TokenFile, Tokens, joined, require_size
from polysketch.storage import disk
from polysketch.storage.folders import LOCK_FILE
from polysketch.storage.sums import sha256_of

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
    """A folder made by ``prepare``, or token files that others made.

    Attributes:
        folder: Where it is; of others' files what names them.
        description: What description.json says, or what was found.
        tokenizer: The tokenizer it was prepared with.
    """

    folder: Path
    description: DataDescription
    tokenizer: TokenizerLike
    _foreign: Mapping[str, ShardedTokens] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: str | Path, tokenizer: TokenizerLike | None = None) -> PreparedData:
        """Open a prepared folder, or token files of Megatron-LM, nanoGPT or llm.c.

        The sizes of all files and the tokenizer are checked, the tokens not read.

        Args:
            folder: The folder; or of others' files the folder, a file, or what the names of some begin with.
            tokenizer: What made the ids of others' files. A prepared folder has its own, and this is not looked at.

        Raises:
            FileNotFoundError: The folder or one of its files is missing, or files of others come without a tokenizer.
            ValueError: The description is damaged, a file was cut short or is of another layout, or the tokenizer is
                not the one it names.
            ImportError: The extra that the tokenizer needs is missing.
        """
        folder = Path(folder)
        if not is_foreign(folder):
            description = read_description(folder)
            return cls(folder, description, described_tokenizer(folder, description.tokenizer))
        if tokenizer is None:
            layout, _ = read_layout(folder)
            raise FileNotFoundError(
                f"expected {DESCRIPTION_FILE} in {folder}, or --tokenizer or --vocab-size for the token files of "
                f"{layout} there, which polysketch did not prepare; found neither"
            )
        found, tokens = read_foreign(folder, tokenizer)
        return cls(folder, found, tokenizer, tokens)

    def split(self, name: str) -> Split:
        """One split, memory-mapped.

        Raises:
            ValueError: There is no such split.
        """
        split = split_in(self.folder, self.description, name)
        if self._foreign:
            return Split(name, self._foreign[name], split.tokens, split.documents, split.bytes)
        dtype = DTYPES[self.description.dtype]
        files = [TokenFile(self.folder / shard.file, dtype, shard.tokens) for shard in split.shards]
        return Split(name, joined(files), split.tokens, split.documents, split.bytes)

    def verify(self, *names: str, once: bool = False) -> None:
        """Read every token file and compare its sha256 with the description: about a second for 500 MB.

        Args:
            names: Splits whose files are read; all where none is given.
            once: Leave out files of which this version was compared before on this machine, by place, size and time.

        Of files that others made there is no such sum; nothing is read again.

        Raises:
            ValueError: A file differs from what ``prepare`` wrote, if only by one bit.
        """
        if self._foreign:
            return
        for name in names or self.description.splits:
            for shard in split_in(self.folder, self.description, name).shards:
                path = self.folder / shard.file
                if once and is_compared(path, shard.sha256):
                    continue
                _require_sha256(path, shard.sha256)
                if once:
                    remember(path, shard.sha256)

    @property
    def sha256(self) -> str:
        """Fingerprint of the description, which has those of the files: the same for a copy in another place."""
        if self._foreign:
            return self.description.sha256
        return sha256_of(self.folder / DESCRIPTION_FILE)

    def copy_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and the description into a folder, which ``load_tokenizer`` can then read.

        Each file appears whole; one that is there already as it should be is left alone.
        """
        described = self.description.encoded() if self._foreign else (self.folder / DESCRIPTION_FILE).read_bytes()
        if self.tokenizer.file_name is not None:
            _put(folder / self.tokenizer.file_name, self.tokenizer.serialized())
        _put(folder / DESCRIPTION_FILE, described)


def _put(path: Path, contents: bytes) -> None:
    if path.is_symlink() or not path.is_file() or path.read_bytes() != contents:
        disk.replace_file(path, contents)


def is_foreign(path: Path) -> bool:
    """Whether a path names token files that polysketch did not prepare; those of an unfinished folder are its own."""
    ours = (DESCRIPTION_FILE, RECORD_FILE, LOCK_FILE)
    return not any((path / name).exists() for name in ours) and holds_foreign_files(path)


def require_data(path: Path) -> None:
    """Refuse a path that names neither a prepared folder nor token files of others that can be read.

    Raises:
        FileNotFoundError, ValueError: As ``PreparedData.open``, but for the tokenizer.
    """
    read_layout(path) if is_foreign(path) else read_description(path)


def read_description(folder: Path) -> DataDescription:
    """What a prepared folder holds; the sizes of its files are checked, the tokenizer is not loaded.

    Raises:
        FileNotFoundError, ValueError: As ``PreparedData.open``, but for the tokenizer; also for files of others.
    """
    if is_foreign(folder):
        raise ValueError(
            f"expected a folder made by polysketch prepare, found other token files at {folder}, which train and "
            "evaluate read as they are"
        )
    description = description_alone(folder)
    for split in description.splits.values():
        for shard in split.shards:
            require_size(folder / shard.file, shard.tokens * DTYPES[description.dtype].itemsize)
    return description


def description_alone(folder: Path) -> DataDescription:
    """As ``read_description``, whatever became of the files that it describes."""
    description = DataDescription.read(folder / DESCRIPTION_FILE)
    if description.dtype not in DTYPES:
        raise ValueError(f"expected tokens of {' or '.join(DTYPES)} in {folder}, found {description.dtype!r}")
    for name, split in description.splits.items():
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError(f"expected {split.tokens} tokens in the files of {name} in {folder}, found other counts")
    return description


def split_in(folder: Path, description: DataDescription, name: str) -> SplitDescription:
    """What the description of a folder says about one split.

    Raises:
        ValueError: There is no such split.
    """
    if name not in description.splits:
        raise ValueError(
            f"expected a split of {', '.join(description.splits)} in {folder}, found {name!r}: name one of these, or "
            "prepare the text again with a share for it"
        )
    return description.splits[name]


def require_shard(folder: Path, shard: ShardDescription, dtype: str) -> None:
    """Compare a token file with what was prepared: its size, and then its sha256.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is another.
    """
    require_size(folder / shard.file, shard.tokens * DTYPES[dtype].itemsize)
    _require_sha256(folder / shard.file, shard.sha256)


def _require_sha256(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ValueError(
            f"expected {path} with sha256 {expected[:12]}, found {found[:12]}: the file was altered or "
            "damaged after it was prepared; prepare again"
        )
