"""Scratch memory that a loop over chunks uses again and again, so that it stays in cache and costs no allocation."""

from torch import Tensor

from polysketch.ops.linear.packing_strips import Triangle


class Workspace:
    """Named buffers that grow to the largest shape asked for; `take` gives uninitialised memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._triangles: dict[tuple[int, ...], Triangle] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of `shape`, dtype and device of `like`; the last one taken by this name is void."""
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)

    def triangle(self, x: Tensor) -> Triangle:
        """Memory for expanding x (G, tokens, r); the last one of this shape is void."""
        groups, tokens, features = x.shape
        if (groups, tokens, features) not in self._triangles:
            self._triangles[groups, tokens, features] = Triangle(groups, features, tokens, x)
        return self._triangles[groups, tokens, features]
