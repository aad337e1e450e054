"""The description.json of a prepared folder: what the files beside it hold, and how to check them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.storage.outside import read_json
from polysketch.storage.sealed import sealed, unsealed

if TYPE_CHECKING:
    from polysketch.data.tokenization.base import TokenizerLike

DESCRIPTION_FILE = "description.json"
RECORD_FILE = "unfinished.json"  # instead of it, while a folder is being made
FORMAT = "polysketch-data"
FORMAT_VERSION = 2  # 1 has one file for each split, and is still written where one file is enough
READABLE_VERSIONS = (1, 2)
SPLITS = ("train", "validation", "test")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TokenizerDescription:
    """The tokenizer of a prepared folder.

    Attributes:
        kind: Key of ``TOKENIZERS``.
        name: Kind and size in words, for instance ``"bpe:8192"``.
        file: File in the folder, or None for a kind that needs none.
        sha256: Fingerprint of the tokenizer.
        vocab_size: Number of ids.
        end_of_text: Id that ends a document.
        lossless: Whether every byte of the text survives.
    """

    kind: str
    name: str
    file: str | None
    sha256: str
    vocab_size: int
    end_of_text: int
    lossless: bool

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TokenizerDescription:
        """The fields, as plain JSON values.

        Raises:
            ValueError: A field is of another type, or the file no plain name.
            TypeError: A field is missing or unknown.
        """
        found = cls(**values)
        wrong = _wrong_field(found)
        if wrong is not None or not (found.file is None or _PLAIN_NAME.fullmatch(found.file)):
            raise ValueError(f"expected the description of a tokenizer, found {wrong or repr(found.file)}")
        return found

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> TokenizerDescription:
        """That of a tokenizer, which its ``save`` writes beside the description."""
        return cls(
            kind=tokenizer.kind,
            name=tokenizer.name,
            file=tokenizer.file_name,
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            lossless=tokenizer.lossless,
        )


@dataclass(frozen=True)
class ShardDescription:
    """One file of tokens, or of a file that others made a stretch.

    Attributes:
        file: File in the folder: token ids one after another, little-endian.
        tokens: Number of ids.
        sha256: Of the file; of one that others made, of its size, its beginning and its end.
        offset: Bytes of the file before the first of the ids.
    """

    file: str
    tokens: int
    sha256: str
    offset: int = 0


@dataclass(frozen=True)
class SplitDescription:
    """The tokens of one split, in one file or in several that are read one after the other.

    Attributes:
        tokens: Number of ids, ends of text included.
        documents: Number of documents, each ended by an end of text; 0 where others made the files and do not say.
        bytes: Number of bytes of UTF-8 text, ends of text not included; 0 where others made the files.
        shards: The files in their order. A document may begin in one and end in the next.
    """

    tokens: int
    documents: int
    bytes: int
    shards: tuple[ShardDescription, ...]

    @property
    def sha256(self) -> str:
        """Fingerprint of the tokens: of the only file its sha256, of several the sha256 of theirs in a row."""
        if len(self.shards) == 1:
            return self.shards[0].sha256
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; a split of one file as version 1 of the format has it."""
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        if len(self.shards) == 1 and not self.shards[0].offset:
            return {"file": self.shards[0].file} | counts | {"sha256": self.shards[0].sha256}
        return counts | {"shards": [dataclasses.asdict(shard) for shard in self.shards]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SplitDescription:
        """The inverse of ``to_dict``.

        Raises:
            KeyError, TypeError: Something is missing, or there is more.
        """
        counts = dict(values)
        if "shards" in counts:
            shards = [ShardDescription(**shard) for shard in counts.pop("shards")]
        else:
            shards = [ShardDescription(counts.pop("file"), counts["tokens"], counts.pop("sha256"))]
        return cls(**counts, shards=tuple(shards))


_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "str | None": str | None,
    "tuple[ShardDescription, ...]": tuple,
}


def _wrong_field(described: Any) -> str | None:
    """The first field of another type than it has, or of a count below 0, in words; None where there is none."""
    for field in dataclasses.fields(described):
        value, wanted = getattr(described, field.name), _TYPES[str(field.type)]
        is_flag = isinstance(value, bool)
        if not isinstance(value, wanted) or is_flag != (wanted is bool) or (isinstance(value, int) and value < 0):
            return f"{field.name} of {str(value)[:40]!r}, which is no {field.type}"
    return None


@dataclass(frozen=True)
class DataDescription:
    """A prepared folder.

    Attributes:
        tokenizer: The tokenizer.
        dtype: ``"uint16"`` or ``"uint32"``, of every token file.
        splits: Non-empty splits by name.
        sources: What was prepared, as the user named it.
        seed: Seed of the split by document.
        skipped: Documents that were left out, by reason (``empty``, ``undecodable``).
        layout: Who made the files, where that was not ``prepare``.
    """

    tokenizer: TokenizerDescription
    dtype: str
    splits: dict[str, SplitDescription]
    sources: tuple[str, ...] = ()
    seed: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    layout: str | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    @property
    def end_of_text(self) -> int:
        """Id that ends a document."""
        return self.tokenizer.end_of_text

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, with the format's name and the first of its versions that can say this."""
        splits = {name: split.to_dict() for name, split in self.splits.items()}
        values = dataclasses.asdict(self) | {"splits": splits}
        if self.layout is None:
            del values["layout"]
        is_older = self.layout is None and not any("shards" in split for split in splits.values())
        return {"format": FORMAT, "version": 1 if is_older else FORMAT_VERSION} | values

    @classmethod
    def from_dict(cls, values: dict[str, Any], origin: str = DESCRIPTION_FILE) -> DataDescription:
        """The inverse of ``to_dict``.

        Args:
            values: The JSON object.
            origin: Where it was read, for messages.

        Raises:
            ValueError: It is not a description, is of another version, lacks something, or its sha256 is of another.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"expected a description of prepared data in {origin}, found other JSON")
        if values.get("version") not in READABLE_VERSIONS:
            raise ValueError(
                f"expected version {' or '.join(map(str, READABLE_VERSIONS))} of prepared data in {origin}, found "
                f"{values.get('version')}: it was written by another version of polysketch; prepare again"
            )
        values = unsealed(values, origin)
        fields = {key: value for key, value in values.items() if key not in ("format", "version")}
        try:
            fields["tokenizer"] = TokenizerDescription(**fields["tokenizer"])
            fields["splits"] = {name: SplitDescription.from_dict(split) for name, split in fields["splits"].items()}
            description = cls(**fields | {"sources": tuple(fields.get("sources", ()))})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"expected a complete description of prepared data in {origin}, found {error}") from error
        description._require_plain_names(origin)
        description._require_types(origin)
        return description

    def _require_plain_names(self, origin: str) -> None:
        """Refuse files outside the folder: a description may come from a stranger, and its files are copied."""
        shards = [shard.file for split in self.splits.values() for shard in split.shards]
        for name in [self.tokenizer.file, *(shards if self.layout is None else ())]:
            if name is not None and (not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name)):
                raise ValueError(f"expected the plain name of a file beside {origin} in it, found {name!r}")

    def _require_types(self, origin: str) -> None:
        """Refuse values that the fields cannot have."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        for each in (self.tokenizer, *self.splits.values(), *shards):
            wrong = _wrong_field(each)
            if wrong is not None:
                raise ValueError(f"expected a complete description of prepared data in {origin}, found {wrong}")
        texts = (self.dtype, *self.sources, *([] if self.layout is None else [self.layout]))
        counts = (self.seed, *(self.skipped.values() if isinstance(self.skipped, dict) else [None]))
        for value, kind in (*((text, str) for text in texts), *((count, int) for count in counts)):
            if not isinstance(value, kind):
                raise ValueError(
                    f"expected a complete description of prepared data in {origin}, found {value!r:.40}, which is no "
                    f"{kind.__name__}"
                )

    def encoded(self) -> bytes:
        """As indented JSON, with a sha256 of itself."""
        return json.dumps(sealed(self.to_dict()), indent=2).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """Fingerprint of what it says."""
        return hashlib.sha256(json.dumps(self.to_dict(), indent=2).encode() + b"\n").hexdigest()

    def write(self, path: Path) -> None:
        """Write as indented JSON."""
        path.write_bytes(self.encoded())

    @classmethod
    def read(cls, path: Path) -> DataDescription:
        """Read what ``write`` wrote.

        Raises:
            FileNotFoundError: The folder, or the description in it, is missing.
            ValueError: The file is damaged or of another version.
        """
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"expected a prepared folder, found nothing at {path.parent}: run polysketch prepare, or "
                "polysketch task for a task"
            )
        if not path.exists():
            raise FileNotFoundError(
                f"expected {path.name} in {path.parent}, found none: this is no folder made by polysketch prepare"
            )
        return cls.from_dict(read_json(path), str(path))
