"""The flag --chat-template of several commands."""

from __future__ import annotations

from pathlib import Path

__all__ = ["require_template"]


def require_template(file: Path | None) -> None:
    """Refuse a template that is not there, before anything is loaded.

    Raises:
        FileNotFoundError: no such file.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"--chat-template: expected a file, found none at {file}")
