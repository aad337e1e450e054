"""manifest.json: what files a checkpoint consists of, with their sizes and sha256 sums."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from polysketch.storage.outside import decoded

MANIFEST = "manifest.json"
FORMAT = 1


def describe(data: bytes) -> dict[str, int | str]:
    """What the manifest says about a file with the content `data`."""
    return {"bytes": len(data), "sha256": sha256(data)}


def manifest_bytes(entries: Mapping[str, Mapping[str, int | str]]) -> bytes:
    """The content of a manifest that lists `entries` (file name -> what `describe` says)."""
    return json.dumps({"format": FORMAT, "files": dict(entries)}, indent=2).encode() + b"\n"


def sha256(data: bytes) -> str:
    """The sha256 sum of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_verified(folder: Path, name: str) -> bytes:
    """Read the file `name` of a checkpoint, checking it against the manifest.

    The bytes that are returned are the ones that were checked; nothing is read twice.

    Raises:
        FileNotFoundError: the manifest or the file is missing.
        ValueError: the manifest cannot be read, or size or sha256 differ; says expected, found and what to do.
    """
    expected = _entry(folder, name)
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, but {MANIFEST} lists it: the checkpoint is damaged; {_advice(folder)}"
        )
    size = path.stat().st_size  # before it is read: a hole of terabytes is a small file
    if size != expected["bytes"]:
        raise ValueError(
            f"{path}: expected {expected['bytes']} bytes, found {size}: truncated or altered; {_advice(folder)}"
        )
    data = path.read_bytes()
    found = sha256(data)
    if found != expected["sha256"]:
        raise ValueError(
            f"{path}: expected sha256 {expected['sha256']}, found {found}: "
            f"altered, or damaged on the disk; {_advice(folder)}"
        )
    return data


def listed(folder: Path) -> list[str]:
    """The names of the files of a checkpoint.

    Raises:
        FileNotFoundError: the manifest is missing.
        ValueError: it cannot be read, or names what does not lie in the folder.
    """
    try:
        names = [*decoded(_manifest(folder), folder / MANIFEST)["files"]]
        if all(Path(name).name == name for name in names):
            return names
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder / MANIFEST}: expected a list of files in the folder, found something else: altered")


def files_in(folder: Path, kind: str) -> list[str]:
    """The names of the files that hold what is of one kind, in order.

    Args:
        folder: of a checkpoint.
        kind: `model`, for instance, which stands in `model.safetensors`, or in pieces in
            `model-00001-of-00004.safetensors` and those like it.

    Raises:
        FileNotFoundError, ValueError: as `read_verified`, of the manifest; or some pieces are not listed.
    """
    try:
        names = decoded(_manifest(folder), folder / MANIFEST)["files"]
        counts = [found[1] for name in names if (found := re.fullmatch(rf"{kind}-\d+-of-(\d+)\.safetensors", name))]
    except (ValueError, KeyError, TypeError):
        counts = []  # what is wrong is said where the file is read
    if not counts:
        return [f"{kind}.safetensors"]
    pieces = [f"{kind}-{number + 1:05d}-of-{counts[0]}.safetensors" for number in range(len(counts))]
    if int(counts[0]) != len(counts) or any(piece not in names for piece in pieces):
        raise ValueError(
            f"{folder / MANIFEST}: expected all pieces of {kind}-*-of-{counts[0]}.safetensors, found {len(counts)} of "
            f"their kind: altered; {_advice(folder)}"
        )
    return pieces


def _manifest(folder: Path) -> bytes:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected a complete checkpoint folder; {_advice(folder)}")
    return path.read_bytes()


def _entry(folder: Path, name: str) -> dict:
    """The manifest's line about `name`, checked for its form."""
    content = _manifest(folder)
    try:
        manifest = decoded(content, folder / MANIFEST)
        entry = manifest["files"][name]
        well_formed = manifest["format"] == FORMAT and type(entry["bytes"]) is int and type(entry["sha256"]) is str
    except (ValueError, KeyError, TypeError):
        well_formed = False
    if not well_formed:
        raise ValueError(
            f"{folder / MANIFEST}: expected a manifest of format {FORMAT} that lists {name}, found something else: "
            f"altered, or written by another version; {_advice(folder)}"
        )
    return entry


def _advice(folder: Path) -> str:
    others = sorted(path.name for path in folder.parent.glob("step-*") if path.name != folder.name)
    if not others:
        return "there is no other checkpoint beside it"
    return f"to use another checkpoint on purpose, name it: --checkpoint {others[-1]}"
