"""Whether compiled programs that lie in a folder may be loaded: nobody else can have written them, and all is there.

A library that is loaded runs. So neither it nor its folder may be writable for others; and its bytes are those that the
compiler made, for one that was cut short ends the process by a signal when a missing page is touched.
"""

import os
import stat
from pathlib import Path

from polysketch.ops.native.compiler import named_by_content

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


def why_untrusted_beside(path: Path, code: Path) -> str | None:
    """Why a file that came with the package is trusted less than the package's code; None where it is not.

    Whoever wrote that code, or may write it, has this user run what they want anyway: a package that root installed
    belongs to root. The two lie in one folder.
    """
    if os.name == "nt":
        return None
    found, ours = path.lstat(), code.stat()
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is no plain file"
    if found.st_uid not in (os.geteuid(), ours.st_uid):
        return f"{path} belongs to user {found.st_uid}"
    others_more = found.st_mode & _OTHERS_WRITE & ~ours.st_mode
    group_differs = found.st_mode & stat.S_IWGRP and found.st_gid != ours.st_gid
    if others_more or group_differs:
        return f"{path} can be written by others than {code.name} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def find_trusted(folder: Path, stem: str) -> Path | None:
    """A library of this stem that is whole and nobody else's; None where there is none."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if path.is_file() and why_untrusted(path) is None and path.name == named_by_content(stem, path.read_bytes()):
            return path
    return None
