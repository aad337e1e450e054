"""Scratch memory that a loop over chunks uses again and again, so that it stays in cache and costs no allocation."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Workspace:
    """Named buffers that grow to the largest shape asked for; `take` gives uninitialised memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._kept: dict[Hashable, Any] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of `shape`, dtype and device of `like`; the last one taken by this name is void."""
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave for this key the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
