"""The state of softmax over a window and one key beside it: the window's tokens, and sums."""

from dataclasses import dataclass

from torch import Tensor

from polysketch import ops
from polysketch.attention.recent_tokens import RecentTokens


@dataclass
class WindowState:
    """The tokens of the window, and sums over all tokens before them.

    Attributes:
        recent: the last `window` tokens: keys, behind them what is kept of each for the sums, and values.
        far: sums over the tokens that have left the window; or rows of a server's, as `recent` is then too.
    """

    recent: RecentTokens
    far: ops.LinearAttentionState | ops.StateRows

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one."""
        return self.recent.position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: from the first tokens on the same at every position."""
        return self.recent.nbytes + self.far.nbytes

    def clone(self) -> "WindowState":
        """A copy to roll back to."""
        return WindowState(self.recent.clone(), self.far.clone())

    def reorder(self, indices: Tensor) -> "WindowState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        return WindowState(self.recent.reorder(indices), self.far.reorder(indices))

    def require_sizes(
        self, key_heads: int, window: int, kept_width: int, value_dim: int, sums: tuple[int, int, int]
    ) -> None:
        """Refuse a state that another mechanism has made: programs read its memory by the sizes that they are told.

        Args:
            key_heads, window, value_dim: of the mechanism and its values.
            kept_width: of a key and what is kept of it.
            sums: their power, their factors and the number of their rows.

        Raises:
            ValueError: other sizes.
        """
        pool = self.far.pool
        expected: tuple[object, ...] = (window, key_heads, sums)
        found: tuple[object, ...] = (
            self.recent.capacity,
            pool.sums.shape[1],
            (pool.power, pool.factors, pool.sums.shape[2]),
        )
        if self.recent.held is not None:
            key, value, _ = self.recent.held
            expected += ((key_heads, window, kept_width), (key_heads, window, value_dim))
            found += (tuple(key.shape[1:]), tuple(value.shape[1:]))
        if found != expected:
            raise ValueError(
                "the state was made by a mechanism of other sizes: expected (window, key heads, (power, factors and "
                f"rows of sums), shapes of what the window keeps) {expected}, got {found}"
            )
