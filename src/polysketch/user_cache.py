"""Where things are kept for the user that can be made again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """`polysketch` under $XDG_CACHE_HOME, or under ~/.cache where that is not set; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polysketch"
