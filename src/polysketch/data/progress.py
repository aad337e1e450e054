"""A progress bar over bytes with its throughput, or nothing at all."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

from polysketch.extras import require


class Progress(Protocol):
    """The part of a tqdm bar that is used here."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any: ...

    def update(self, amount: int) -> Any:
        """Advance by some bytes."""


class Silence:
    """Progress that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, amount: int) -> None:
        """Do nothing."""


def byte_progress(description: str, total: int | None, *, enabled: bool, done: int = 0) -> Progress:
    """A bar on standard error that counts bytes.

    Args:
        description: What is being done.
        total: Bytes in all: the bar then shows the speed and the time left. None when that is not known: the amount and
            the speed alone.
        done: Bytes that were done before.
        enabled: Whether to show anything.

    Raises:
        ImportError: The bar is wanted and the extra ``train`` is missing.
    """
    if not enabled:
        return Silence()
    interval = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a file or a pipe keeps every line
    options = {"unit": "B", "unit_scale": True, "smoothing": 0.05, "dynamic_ncols": True, "mininterval": interval}
    return require("tqdm").tqdm(total=total, initial=done, desc=description, **options)
