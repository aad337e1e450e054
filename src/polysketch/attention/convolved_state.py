"""What decoding carries where a causal convolution stands beside attention over features."""

from dataclasses import dataclass

from torch import Tensor

from polysketch import ops


@dataclass
class ConvolvedState:
    """The state of attention over features, the values the convolution still needs, and the number of keys.

    Attributes:
        attention: sums over the tokens seen.
        tail: (batch, num_kv_heads, size - 1, head_dim), the last values.
        count: (batch,) tokens seen that were not masked, floating: means are sums divided by it.
    """

    attention: ops.LinearAttentionState
    tail: Tensor
    count: Tensor

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one."""
        return self.attention.position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the same at every position."""
        return self.attention.nbytes + sum(x.numel() * x.element_size() for x in (self.tail, self.count))

    def clone(self) -> "ConvolvedState":
        """A copy to roll back to."""
        return ConvolvedState(self.attention.clone(), self.tail.clone(), self.count.clone())

    def reorder(self, indices: Tensor) -> "ConvolvedState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        tail, count = (x.index_select(0, indices.to(x.device)) for x in (self.tail, self.count))
        return ConvolvedState(self.attention.reorder(indices), tail, count)
