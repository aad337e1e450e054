"""The state of attention to nearby tokens: a ring of the last keys and values, of constant size."""

from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.attention.positions import advance_positions
from polysketch.ops.arguments import check_rows


class RecentTokens:
    """The last `capacity` keys and values of each row: a token stands in the slot position modulo capacity.

    Positions count from a row's first real token. Buffers are allocated whole at the first `append`, in its dtype
    unless one was given; from then on their size is constant.

    The rows may be some of another's (`rows_of`): one token of each is then read and written where it lies, and more
    tokens by way of a copy.

    Attributes:
        position: (batch,) int64 in host memory, tokens seen since each row's first real one.
        capacity: tokens of a row that are kept.
        rows: (batch,) int64 on the buffers' device, the row of the buffers that each row of the batch has; None for
            its own.

    Args:
        batch_size: rows.
        capacity: tokens of a row to keep.
        device: where the buffers live; that of the first key when None.
        dtype: of the buffers; that of the first key when None.
    """

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.position = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
        self.capacity = capacity
        self.rows: Tensor | None = None
        self._device = device
        self._dtype = dtype
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._real: Tensor | None = None  # (batch, capacity): the slot holds a token that is not masked

    @classmethod
    def rows_of(cls, pool: "RecentTokens", rows: Tensor, position: Tensor) -> "RecentTokens":
        """Some rows of a pool, whose buffers exist, in any order; what they take stands there.

        Args:
            pool: of all rows. Its positions are not read, nor moved on.
            rows: (batch,) int64 on the buffers' device, none twice.
            position: (batch,) int64 in host memory, tokens that each of them has seen.

        Raises:
            ValueError: rows of another shape, dtype or device than that, or, in host memory, that the pool lacks.
        """
        if pool._real is None:
            raise ValueError("expected a pool whose buffers exist, which its first tokens make, found an empty one")
        check_rows(rows, len(position), pool._real)
        some = pool._with(lambda tensor: tensor)
        some.rows, some.position = rows, position
        return some

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; those of keys and values exist from the first `append` on."""
        buffers = (self.position, self._key, self._value, self._real)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The buffers, as `buffers` has them; None before the first token."""
        if self._key is None or self._value is None or self._real is None:
            return None
        return self._key, self._value, self._real

    def count_one(self) -> None:
        """Somebody else has put one real token of every row into its slot of the buffers (`held`)."""
        self.position = self.position + 1

    def slots(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values of every row, by slot; a copy where the rows are some of another's.

        Arguments, returns and errors as of `buffers`.
        """
        kept_key, kept_value, kept_real = self.buffers(key, value)
        return self._own(kept_key), self._own(kept_value), self._own(kept_real)

    def buffers(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The buffers, by row (`rows`) and slot; allocated for tensors like these if there are none yet.

        Args:
            key: (batch, kv_heads, new, head_dim), the tokens to come.
            value: (batch, kv_heads, new, value_dim).

        Returns:
            (rows, kv_heads, capacity, head_dim), (rows, kv_heads, capacity, value_dim) and a (rows, capacity) mask
            of slots that hold a real token. Keys and values of masked tokens are zeros.

        Raises:
            ValueError: the tokens do not fit the state's batch, or the heads and widths of the earlier ones.
        """
        if key.shape[0] != self.position.shape[0]:
            raise ValueError(f"the state holds {self.position.shape[0]} rows, got a batch of {key.shape[0]}")
        if self._key is None or self._value is None or self._real is None:
            self._key, self._value = self._buffer(key), self._buffer(value)
            self._real = torch.zeros(key.shape[0], self.capacity, dtype=torch.bool, device=self._key.device)
        expected = (self._key.shape[1], self._key.shape[3], self._value.shape[3])
        found = (key.shape[1], key.shape[3], value.shape[3])
        if found != expected:
            raise ValueError(f"the state holds (heads, width of keys, width of values) {expected}, got {found}")
        return self._key, self._value, self._real

    def oldest(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the next token replaces, zeros where that is nothing: (batch, kv_heads, 1, width) each.

        Args:
            key, value: the tokens to come, as for `slots`.
        """
        kept_key, kept_value, _ = self.buffers(key, value)
        slot = (self.position[:, None] % self.capacity).to(kept_key.device)
        if self.rows is not None:
            place = (self.rows[:, None], slice(None), slot)
            return kept_key[place].transpose(1, 2), kept_value[place].transpose(1, 2)
        return _take(kept_key, slot), _take(kept_value, slot)

    def followed_by(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The kept tokens from the oldest on, then the new ones, which are not yet kept.

        Returns:
            Keys and values with capacity + new tokens, or the new ones alone while there are no earlier ones, and
            their (batch, tokens) mask or None.
        """
        kept_key, kept_value, kept_real = self.slots(key, value)
        if not bool(self.position.any()):
            return key.to(kept_key.dtype), value.to(kept_value.dtype), key_mask
        if bool((self.position == self.position[0]).all()):
            return self._turned(int(self.position[0]) % self.capacity, key, value, key_mask)
        index = ((self.position[:, None] + torch.arange(self.capacity, device="cpu")) % self.capacity).to(
            kept_key.device
        )
        mask = _all_real(key) if key_mask is None else key_mask
        keys = torch.cat([_take(kept_key, index), key.to(kept_key.dtype)], 2)
        values = torch.cat([_take(kept_value, index), value.to(kept_value.dtype)], 2)
        return keys, values, torch.cat([kept_real.gather(1, index), mask], 1)

    def _turned(
        self, first: int, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`followed_by` where the oldest token of every row is in the slot `first`: one copy, and no index."""
        kept_key, kept_value, kept_real = self.slots(key, value)
        mask = _all_real(key) if key_mask is None else key_mask
        keys, values = (
            torch.cat([kept[:, :, first:], kept[:, :, :first], new.to(kept.dtype)], 2)
            for kept, new in ((kept_key, key), (kept_value, value))
        )
        return keys, values, torch.cat([kept_real[:, first:], kept_real[:, :first], mask], 1)

    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Keep new tokens in the place of the oldest.

        Args:
            key: (batch, kv_heads, new, head_dim).
            value: (batch, kv_heads, new, value_dim).
            key_mask: (batch, new) bool, True for a real token.

        Raises:
            ValueError: as `slots`.
        """
        buffers = self.buffers(key, value)
        real = _all_real(key) if key_mask is None else key_mask
        if key_mask is not None:
            key, value = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (key, value))
        positions, after = advance_positions(self.position, key.shape[2], key_mask)
        new = (key.detach(), value.detach(), real)
        if key.shape[2] == 1:
            self._write_one(buffers, new, positions)
        elif key_mask is None:
            self._write_last(buffers, new, positions)
        else:
            self._write_unpadded(buffers, new, after)
        self.position = after

    def clone(self) -> "RecentTokens":
        """An independent copy, to roll back to."""
        return self._map_rows(torch.clone)

    def reorder(self, indices: Tensor) -> "RecentTokens":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        return self._map_rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def _write_one(self, buffers: tuple, new: tuple, positions: Tensor) -> None:
        """Each row's token into its slot. Padding before a row starts goes to slot 0, which its first token takes."""
        slot = (positions[:, 0] % self.capacity).to(buffers[0].device)
        rows = self._row_numbers(slot)
        for buffer, tensor in zip(buffers[:2], new[:2], strict=True):
            buffer[rows, :, slot] = tensor[:, :, 0].to(buffer.dtype)
        buffers[2][rows, slot] = new[2][:, 0]

    def _write_last(self, buffers: tuple, new: tuple, positions: Tensor) -> None:
        """The last tokens into their slots, as many as there are slots; no other slot is touched."""
        slots = (positions[:, -self.capacity :] % self.capacity).to(buffers[0].device)
        rows = self._row_numbers(slots)[:, None]
        for buffer, tensor in zip(buffers[:2], new[:2], strict=True):
            buffer[rows, :, slots] = tensor[:, :, -self.capacity :].transpose(1, 2).to(buffer.dtype)
        buffers[2][rows, slots] = new[2][:, -self.capacity :]

    def _write_unpadded(self, buffers: tuple, new: tuple, after: Tensor) -> None:
        """Into each slot the last token that belongs there, where that is a new one: padding stands in the way."""
        slot = torch.arange(self.capacity, device="cpu")
        last = after[:, None] - 1 - (after[:, None] - 1 - slot) % self.capacity  # its position
        source = last - after[:, None] + new[0].shape[2]
        is_new = (last >= self.position[:, None]).to(buffers[0].device)
        index = source.clamp(min=0).to(buffers[0].device)
        written = [_take(tensor.to(buffer.dtype), index) for buffer, tensor in zip(buffers[:2], new[:2], strict=True)]
        for buffer, tensor in zip(buffers, (*written, new[2].gather(1, index)), strict=True):
            chosen = is_new[:, None, :, None] if tensor.dim() == 4 else is_new
            kept = torch.where(chosen, tensor, self._own(buffer))
            if self.rows is None:
                buffer.copy_(kept)
            else:
                buffer[self.rows] = kept

    def _row_numbers(self, like: Tensor) -> Tensor:
        """(batch,): the row of the buffers that each row of `like` (batch, ...) has."""
        return torch.arange(like.shape[0], device=like.device) if self.rows is None else self.rows

    def _own(self, buffer: Tensor) -> Tensor:
        """The rows of a buffer that are this state's."""
        return buffer if self.rows is None else buffer.index_select(0, self.rows)

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (*like.shape[:2], self.capacity, like.shape[3])
        return torch.zeros(shape, device=self._device or like.device, dtype=self._dtype or like.dtype)

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> "RecentTokens":
        other = self._with(lambda buffer: function(self._own(buffer)))
        other.position = function(self.position)
        return other

    def _with(self, function: Callable[[Tensor], Tensor]) -> "RecentTokens":
        """Another state with `function` of every buffer that exists, and positions of zero."""
        other = RecentTokens(len(self.position), self.capacity, self._device, self._dtype)
        for name in ("_key", "_value", "_real"):
            buffer = getattr(self, name)
            setattr(other, name, None if buffer is None else function(buffer))
        return other


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Tokens `index` (batch, count) of (batch, heads, length, width)."""
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))


def _all_real(key: Tensor) -> Tensor:
    """A (batch, length) mask of no padding."""
    return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
