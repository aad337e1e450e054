"""SHA256SUMS: what every file of a folder was when it was written, in the form that `sha256sum --check` reads."""

import hashlib
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path

from polysketch.storage.outside import LARGEST, decoded

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_FOR_PEOPLE = ".md"  # which no command reads, and which anyone may reword
_WEIGHTS = (".safetensors", ".onnx", ".data", ".pt2", ".bin")
_LARGEST_HEADER = 10**8  # bytes, as safetensors has it


def write_sums(folder: Path) -> None:
    """Write the sums of all files in a folder, those in folders inside it too, and not of hidden ones."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    shown = [name for name in names if not name.startswith(".") and name != SUMS]
    lines = "".join(f"{sha256_of(folder / name)}  {name}\n" for name in shown)
    (folder / SUMS).write_text(lines, encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Name -> sum, as a folder's SHA256SUMS has them.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line of another form, or a name that leads out of the folder.
    """
    path, found = folder / SUMS, {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or Path(match[2]).is_absolute() or ".." in Path(match[2]).parts:
            raise ValueError(f"{path}, line {number}: expected a sha256, two spaces and a file of the folder")
        found[match[2]] = match[1]
    return found


def require_sums(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Compare the files of a folder with its SHA256SUMS before they are used; one without is taken as it is.

    Texts for people (.md) are left out: no command reads them.

    Args:
        folder: of a model, for instance.
        wanted: which files, by their names in the list.

    Raises:
        FileNotFoundError: a listed file is missing.
        ValueError: another file than is listed, a list of another form, or a file too large to be what was written.

    Cost: every file is read once, about a second for 500 MB.
    """
    if not (folder / SUMS).is_file():
        return
    for name, expected in read_sums(folder).items():
        if wanted(name) and not name.endswith(_FOR_PEOPLE):
            require_sum(folder, name, expected)


def is_no_weight(name: str) -> bool:
    """Whether a file may say something of a model's tokenizer, which config.json does too, and weights do not."""
    return not name.endswith(_WEIGHTS)


def require_sum(folder: Path, name: str, expected: str) -> None:
    """Compare one file of a folder with its sum; errors as in `require_sums`."""
    advice = f"export again, or delete {folder / SUMS} if you changed it on purpose"
    path = folder / name
    if not path.is_file():  # nor a pipe, which would be waited for
        raise FileNotFoundError(f"{path} is missing, but {SUMS} lists it: {advice}")
    if path.stat().st_size > _most_bytes(path):  # terabytes of a hole would be read for hours
        raise ValueError(f"{path}: expected sha256 {expected[:12]}, found a file of another size: damaged; {advice}")
    found = sha256_of(path)
    if found != expected:
        raise ValueError(f"{path}: expected sha256 {expected[:12]}, found {found[:12]}: altered or damaged; {advice}")


def _most_bytes(path: Path) -> float:
    """Bytes that a file can have: of tensors, what its header says; weights of other forms have no bound."""
    if path.suffix != ".safetensors":
        return math.inf if path.suffix in _WEIGHTS else LARGEST
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        header = file.read(min(length, _LARGEST_HEADER))
    try:
        entries = decoded(header, path).values()
        return 8 + length + max((entry["data_offsets"][1] for entry in entries if "data_offsets" in entry), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return LARGEST


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits; read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
