"""Whether compiled programs that lie in a folder may be loaded: nobody else can have written them, and all is there.

A library that is loaded runs. So neither it nor its folder may be writable for others; and its bytes are those that the
compiler made, for one that was cut short ends the process by a signal when a missing page is touched.
"""

import hashlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_untrusted(path: Path) -> str | None:
    """Why a file or folder is not this user's own alone; None where it is, or where there are no owners (Windows)."""
    if os.name == "nt":
        return None
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def why_folder_untrusted(folder: Path) -> str | None:
    """The same of a folder and of those above it: who may rename one of them can put another in its place.

    Above it, owners and groups are taken for people whom the user trusts. Folders that all may write to are refused,
    but for those like /tmp, where nobody can rename what is another's.
    """
    reason = why_untrusted(folder)
    if reason is not None or os.name == "nt":
        return reason
    for above in folder.resolve().parents:
        found = above.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"{above} can be written by all"
    return None


def named_by_content(stem: str, content: bytes) -> str:
    """The file name of a library; it holds the sha256 of the content, so that one rename publishes both."""
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def find_trusted(folder: Path, stem: str) -> Path | None:
    """A library of this stem that is whole and nobody else's; None where there is none."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if path.is_file() and why_untrusted(path) is None and path.name == named_by_content(stem, path.read_bytes()):
            return path
    return None
