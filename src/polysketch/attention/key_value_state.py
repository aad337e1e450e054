"""The state of exact attention: every key and value so far, in buffers that double when they are full."""

from collections.abc import Iterable

import torch
from torch import Tensor

from polysketch.attention.positions import advance_positions

_FIRST_CAPACITY = 64


class KeyValueState:
    """All keys and values of the tokens so far. It grows with the context: 2 * head_dim numbers a token and kv head.

    Buffers are allocated at the first `append`, in its dtype unless one was given, and doubled when full, so that
    appending one token costs amortised constant time. `reserve` makes room at once for a length that is known.

    Attributes:
        position: (batch,) int64 in host memory, tokens seen since each row's first real one.
        length: tokens appended so far, padding included; the same for every row.

    Args:
        batch_size: rows.
        device: where the buffers live; that of the first key when None.
        dtype: of the buffers; that of the first key when None.
    """

    def __init__(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.position = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
        self.length = 0
        self._reserved = _FIRST_CAPACITY
        self._device = device
        self._dtype = dtype
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._mask: Tensor | None = None  # None as long as every token was real: unmasked attention is faster

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, unused capacity included."""
        buffers = (self.position, self._key, self._value, self._mask)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of a token of all rows; 0 before the first `append`."""
        buffers = (self._key, self._value)
        return sum(buffer[:, :, :1].numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    def reserve(self, tokens: int) -> None:
        """Let buffers be allocated for so many tokens, not fewer and not more, as long as these are enough."""
        self._reserved = tokens

    def tensors(self) -> dict[str, Tensor]:
        """Keys and values of the tokens so far by the names "key" and "value", without spare room: to be kept.

        Raises:
            ValueError: before the first `append`, or padding among the tokens.
        """
        if self._key is None or self._value is None or self._mask is not None:
            raise ValueError("expected tokens, and no padding among them, to keep the keys and values of")
        return {"key": self._key[:, :, : self.length], "value": self._value[:, :, : self.length]}

    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add new tokens and give all so far.

        Args:
            key: (batch, kv_heads, new, head_dim).
            value: (batch, kv_heads, new, value_dim).
            key_mask: (batch, new) bool, True for a real token.

        Returns:
            Views of all keys, of all values, and the (batch, length) mask or None when every token was real.

        Raises:
            ValueError: the tokens do not fit the state's batch, or the heads and widths of the earlier ones.
        """
        self._check(key, value)
        start, end = self.length, self.length + key.shape[2]
        dtype = self._dtype or key.dtype
        self._key = self._with_room(self._key, key, end, dtype)
        self._value = self._with_room(self._value, value, end, dtype)
        self._key[:, :, start:end] = key.detach()
        self._value[:, :, start:end] = value.detach()
        mask = self._append_mask(key_mask, start, end, self._key.device)
        _, self.position = advance_positions(self.position, end - start, key_mask)
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end], mask

    def clone(self) -> "KeyValueState":
        """An independent copy, to roll back to, with no more room than its tokens need."""
        other = self._map_rows(torch.clone)
        for name in ("_key", "_value", "_mask"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else tensor[:, :, : self.length].clone())
        return other

    def reorder(self, indices: Tensor) -> "KeyValueState":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        return self._map_rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def _map_rows(self, function) -> "KeyValueState":
        other = KeyValueState(0, self._device, self._dtype)
        other.length = self.length
        for name in ("position", "_key", "_value", "_mask"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else function(tensor))
        return other

    def _append_mask(self, key_mask: Tensor | None, start: int, end: int, device: torch.device) -> Tensor | None:
        if self._mask is None and (key_mask is None or bool(key_mask.all())):
            return None
        if key_mask is None:
            key_mask = torch.ones(self.position.shape[0], end - start, dtype=torch.bool, device="cpu")
        new = key_mask[:, None, :, None]  # shaped like keys, so that the buffer grows as theirs do
        earlier_are_real = self._mask is None
        self._mask = self._with_room(self._mask, new, end, torch.bool)
        if earlier_are_real:
            self._mask[:, :, :start] = True
        self._mask[:, :, start:end] = new
        return self._mask[:, 0, :end, 0]

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[0] != self.position.shape[0]:
            raise ValueError(f"the state holds {self.position.shape[0]} rows, got a batch of {key.shape[0]}")
        if self._key is None or self._value is None:
            return
        expected = (self._key.shape[1], self._key.shape[3], self._value.shape[3])
        found = (key.shape[1], key.shape[3], value.shape[3])
        if found != expected:
            raise ValueError(f"the state holds (heads, width of keys, width of values) {expected}, got {found}")

    def _with_room(self, buffer: Tensor | None, new: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """`buffer`, or its content in a larger one, with room for `length` tokens like `new`; a first in `dtype`."""
        if buffer is not None and length <= buffer.shape[2]:
            return buffer
        doubled = 0 if buffer is None else 2 * buffer.shape[2]
        capacity = self._reserved if length <= self._reserved else max(doubled, length)
        batch, heads, _, width = new.shape
        like = dtype if buffer is None else buffer.dtype
        grown = torch.zeros((batch, heads, capacity, width), device=self._device or new.device, dtype=like)
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown


class KeyValueRows:
    """Keys and values of rows of unlike lengths, that come and go: each row has a `KeyValueState` of its own.

    No row is padded to the length of another one, so each takes the memory of its own tokens.

    Args:
        rows: states of one row each; the list is copied.

    Attributes:
        rows: these.
    """

    def __init__(self, rows: Iterable[KeyValueState] = ()) -> None:
        self.rows = list(rows)

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one; a copy."""
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *(row.position for row in self.rows)])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' buffers, unused capacity included."""
        return sum(row.nbytes for row in list(self.rows))

    def clone(self) -> "KeyValueRows":
        """An independent copy, to roll back to."""
        return KeyValueRows(row.clone() for row in self.rows)

    def reorder(self, indices: Tensor) -> "KeyValueRows":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        return KeyValueRows(self.rows[index].clone() for index in indices.tolist())
