"""What a rank sends: tensors as bytes, messages that are under way, and their count."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_under_way: list[tuple[Any, Tensor]] = []
"""Messages and their buffers: one that is forgotten before it has left never arrives."""


class Traffic:
    """Counts messages, and keeps those that are under way, whatever becomes of who sent them.

    Attributes:
        messages: sent so far.
        bytes: in them.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    def sent(self, size: int) -> None:
        """Count a message of so many bytes."""
        self.messages += 1
        self.bytes += size

    def remember(self, work: Any, buffer: Tensor) -> None:
        """Keep a buffer until its message has left; those whose messages have are let go."""
        _under_way[:] = [(each, kept) for each, kept in _under_way if not each.is_completed()]
        _under_way.append((work, buffer))

    def settle(self) -> None:
        """Wait for all messages to have left."""
        for work, _ in _under_way:
            work.wait()
        _under_way.clear()


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of the tensors, one tensor after the other: (bytes,) uint8, a copy."""
    return torch.cat([each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors])


def from_bytes(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `as_bytes`, shaped like these."""
    parts = buffer.split([each.nbytes for each in like])
    # A copy begins at an address that its dtype asks for.
    return [part.clone().view(each.dtype).view(each.shape) for part, each in zip(parts, like, strict=True)]
