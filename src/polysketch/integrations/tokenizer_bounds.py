"""A bound of time for tokenizers of transformers, whose files may hold regular expressions of a stranger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polysketch.data.tokenization.bounded import within_time

__all__ = ["loaded"]


def loaded(load: Callable[[], Any], num_bytes: int) -> Any:
    """A tokenizer, unless it takes far too long to load, that gives up a text which takes it far too long.

    Its calls, `encode` and `tokenize` go through one method, which is replaced in this object; ValueError says that the
    time is over. Tokenizers written in Python are left as they are: a thread that matches there cannot be left.

    Args:
        load: loads it; of transformers.
        num_bytes: of its file.

    Raises:
        ValueError: loading takes too long.
        Whatever `load` raises, and the tokenizer on a text without letters.
    """
    tokenizer = within_time(load, num_bytes, "a tokenizer")
    tokenizer("")  # some settings of a wrong type are only seen when a text is encoded
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return tokenizer
    encode = tokenizer._encode_plus

    def bounded(text: Any, *args: Any, **options: Any) -> Any:
        return within_time(lambda: encode(text, *args, **options), _letters(text), "the tokens of a text")

    tokenizer._encode_plus = bounded
    return tokenizer


def _letters(text: Any) -> int:
    """Of a text, or of texts in lists."""
    return len(text) if isinstance(text, str) else sum(map(_letters, text)) if isinstance(text, list | tuple) else 0
