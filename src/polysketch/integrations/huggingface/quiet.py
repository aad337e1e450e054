"""Silence for commands, and errors in words: transformers shows a bar for every file it reads or writes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no progress bars of transformers inside."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Turn what transformers raises inside, where a file is not as it expects and it does not say so, into ValueError.

    Args:
        folder: that is read, for the message.
    """
    try:
        yield
    except Exception as error:
        told = (ImportError, OSError, ValueError, RuntimeError, MemoryError)
        untold = (RecursionError, UnicodeError, json.JSONDecodeError)  # Python's words, of no file
        if isinstance(error, told) and not isinstance(error, untold):
            raise
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"expected files in {folder} that transformers can read, found others: {said}") from error
