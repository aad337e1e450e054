"""Rows of a state that many share, moved on where they lie: a server's requests, whose memory somebody else allots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from polysketch.ops.arguments import check_rows
from polysketch.ops.linear.state import LinearAttentionState, Result


@dataclass
class StateRows:
    """Some rows of a `LinearAttentionState`, in any order.

    Programs of one token take the number of every row, and read and write it in its place. Whatever takes more tokens,
    or has no such program, computes on a copy of these rows and writes it back (`on_a_copy`).

    Args:
        pool: the state of all rows, its tensors of any stride between rows. Its positions are not read, nor moved on.
        rows: (batch,) int64 on the pool's device, the row in `pool` of each row of the batch; none may stand twice.
        position: (batch,) int64 in host memory, tokens that each of them has seen. It changes in place.

    Raises:
        ValueError: other shapes; rows that `pool` does not have or that stand twice, where they are in host memory. A
            device is not waited for: there nobody looks.

    Attributes:
        device_position: as of `LinearAttentionState`.
    """

    pool: LinearAttentionState
    rows: Tensor
    position: Tensor
    device_position: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check, and give the device positions of its own."""
        device = self.pool.sums.device
        check_rows(self.rows, len(self.position), self.pool.sums)
        if device.type == "cpu" and len(set(self.rows.tolist())) < self.batch_size:
            raise ValueError(f"expected every row once, found {self.rows.tolist()[:16]}")
        self.device_position = self.position if device.type == "cpu" else self.position.to(device)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self.rows)

    @property
    def power(self) -> int:
        """As of `LinearAttentionState`."""
        return self.pool.power

    @property
    def factors(self) -> int:
        """As of `LinearAttentionState`."""
        return self.pool.factors

    @property
    def local_chunk(self) -> int:
        """As of `LinearAttentionState`."""
        return self.pool.local_chunk

    @property
    def value_dim(self) -> int:
        """Width of the values."""
        return self.pool.value_dim

    def opened(self) -> tuple[Tensor, Tensor]:
        """As of `LinearAttentionState`, of these rows."""
        return self.pool.open_key.index_select(0, self.rows), self.pool.open_value.index_select(0, self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows of the pool."""
        return self.pool.nbytes // max(1, self.pool.batch_size) * self.batch_size

    def advance_(self, tokens: int = 1) -> None:
        """As `LinearAttentionState.advance_`."""
        self.position += tokens
        if self.device_position is not self.position:
            self.device_position += tokens

    def clone(self) -> LinearAttentionState:
        """A state of these rows alone, to roll back to."""
        return self.gathered()

    def reorder(self, indices: Tensor) -> LinearAttentionState:
        """As `LinearAttentionState.reorder`: a state of its own."""
        return self.gathered().reorder(indices)

    def gathered(self) -> LinearAttentionState:
        """A copy of these rows, with their positions."""
        own = self.pool.reorder(self.rows)
        own.move_to_(self.position)
        return own

    def on_a_copy(self, move_on: Callable[[LinearAttentionState], Result]) -> Result:
        """Move on a copy of these rows, and write it back.

        Args:
            move_on: moves a state on in place.

        Returns:
            What `move_on` gave.
        """
        own = self.gathered()
        result = move_on(own)
        for name, tensor in own.tensors().items():
            if name != "position":
                getattr(self.pool, name)[self.rows] = tensor
        self.position.copy_(own.position)
        if self.device_position is not self.position:
            self.device_position.copy_(own.device_position)
        return result
