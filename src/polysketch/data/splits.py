"""Which split a document belongs to: by a table, by its folder, or by a hash of its text."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

# What people call the splits, and what they are called here.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}

_SEED_DIGITS = 64  # the longest key of the hash


@dataclass(frozen=True)
class SplitRule:
    """Splits documents by a hash of the seed and their text.

    The same text always falls into the same split, wherever its file lies and whatever else is prepared with it, so
    that exact copies never straddle training and evaluation.

    Attributes:
        validation_share: Expected share of the documents, in [0, 1).
        test_share: Likewise.
        seed: Another seed splits otherwise.

    Raises:
        ValueError: The shares are negative or leave nothing to train on, or the seed has more than 64 digits.
    """

    validation_share: float = 0.05
    test_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.validation_share, self.test_share)
        if len(str(self.seed)) > _SEED_DIGITS:
            raise ValueError(f"expected a seed of at most {_SEED_DIGITS} digits, found one of {len(str(self.seed))}")
        if not all(0 <= share < 1 for share in shares) or sum(shares) >= 1:
            raise ValueError(
                f"expected shares of validation and test in [0, 1) that leave some for training, found {shares[0]} "
                f"and {shares[1]}"
            )

    def split_of(self, text: str) -> str:
        """``"train"``, ``"validation"`` or ``"test"``; a pure function of the seed and the text."""
        digest = hashlib.blake2b(text.encode(), key=str(self.seed).encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "big") / 2**64
        if position < self.test_share:
            return "test"
        return "validation" if position < self.test_share + self.validation_share else "train"

    def share_of(self, split: str) -> float:
        """The expected share of a split."""
        shares = {"validation": self.validation_share, "test": self.test_share}
        return shares.get(split, 1 - self.validation_share - self.test_share)


class SplitTable:
    """Splits from a table: tab-separated, with a header that has the columns ``file`` and ``split``.

    Files are relative to the folder of the table; a file that lies elsewhere is found by its name where that is
    unique in the table. Splits may be called train, validation (valid, val, dev) or test.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the table.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It lacks a column, names an unknown split, or lists a file twice.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"expected a split table, found no file at {self.path}")
        self._by_path: dict[Path, str] = {}
        self._by_name: dict[str, set[str]] = {}
        try:
            self._read()
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"expected a table of UTF-8 text in {self.path}, found something else: {error}") from error

    def split_of(self, path: Path) -> str:
        """The split of a file.

        Raises:
            ValueError: The table does not list it.
        """
        by_name = self._by_name.get(path.name, set())
        split = self._by_path.get(path.resolve()) or (next(iter(by_name)) if len(by_name) == 1 else None)
        if split is None:
            raise ValueError(
                f"expected every source file in the split table {self.path}, found {path} missing: "
                "add it to the table or leave it out with --exclude"
            )
        return split

    def _read(self) -> None:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            rows = _rows(csv.DictReader(file, delimiter="\t"), self.path)
            for row in rows:
                if row["file"] is None or row["split"] is None:
                    raise ValueError(f"{self.path}:{rows.line_num}: expected a file and its split, found fewer columns")
                self._add(row["file"], canonical_split(row["split"], str(self.path)))

    def _add(self, file: str, split: str) -> None:
        if "\0" in file:
            raise ValueError(f"expected names of files in the split table {self.path}, found {file!r}")
        path = (self.path.parent / file).resolve()
        if path in self._by_path:
            splits = f"{self._by_path[path]} and {split}"
            raise ValueError(f"expected every file once in the split table {self.path}, found {file} twice: {splits}")
        self._by_path[path] = split
        self._by_name.setdefault(Path(file).name, set()).add(split)


def canonical_split(name: str, origin: str) -> str:
    """The split that a name means.

    Raises:
        ValueError: The name is none of ``SPLIT_NAMES``.
    """
    if name not in SPLIT_NAMES:
        raise ValueError(f"expected a split of {', '.join(SPLIT_NAMES)} in {origin}, found {name!r}")
    return SPLIT_NAMES[name]


def _rows(reader: csv.DictReader[str], path: Path) -> csv.DictReader[str]:
    columns = reader.fieldnames or []
    if not {"file", "split"} <= set(columns):
        raise ValueError(
            f"expected tab-separated columns file and split in {path}, found {', '.join(columns) or 'an empty file'}"
        )
    return reader
