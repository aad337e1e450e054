"""SHA256SUMS: what every file of a folder was when it was written, in the form that `sha256sum --check` reads."""

import hashlib
import re
from pathlib import Path

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


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


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits; read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
