"""The state of exact attention: every key and value so far, in buffers that double when they are full."""

import torch
from torch import Tensor

from polysketch.attention.positions import advance_positions

_FIRST_CAPACITY = 64


class KeyValueState:
    """All keys and values of the tokens so far. It grows with the context: 2 * head_dim numbers a token and kv head.

    Buffers are allocated at the first `append`, in its dtype unless one was given, and doubled when full, so that
    appending one token costs amortised constant time.

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
            ValueError: the tokens do not fit the state's batch or the widths of the earlier ones.
        """
        self._check(key, value)
        start, end = self.length, self.length + key.shape[2]
        self._key = _with_room(self._key, key, end, self._device, self._dtype)
        self._value = _with_room(self._value, value, end, self._device, self._dtype)
        self._key[:, :, start:end] = key.detach()
        self._value[:, :, start:end] = value.detach()
        mask = self._append_mask(key_mask, start, end, self._key.device)
        _, self.position = advance_positions(self.position, end - start, key_mask)
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end], mask

    def clone(self) -> "KeyValueState":
        """An independent copy, to roll back to."""
        return self._map_rows(torch.clone)

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
        self._mask = _with_room(self._mask, new, end, device, torch.bool)
        if earlier_are_real:
            self._mask[:, :, :start] = True
        self._mask[:, :, start:end] = new
        return self._mask[:, 0, :end, 0]

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[0] != self.position.shape[0]:
            raise ValueError(f"the state holds {self.position.shape[0]} rows, got a batch of {key.shape[0]}")
        if self._key is None or self._value is None:
            return
        expected, found = (self._key.shape[3], self._value.shape[3]), (key.shape[3], value.shape[3])
        if found != expected:
            raise ValueError(f"the state holds keys and values of widths {expected}, got {found}")


def _with_room(
    buffer: Tensor | None, new: Tensor, length: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """`buffer`, or its content in one of doubled capacity, with room for `length` tokens shaped like `new`."""
    if buffer is not None and length <= buffer.shape[2]:
        return buffer
    capacity = _FIRST_CAPACITY if buffer is None else 2 * buffer.shape[2]
    batch, heads, _, width = new.shape
    grown = torch.zeros(
        batch, heads, max(capacity, length), width, device=device or new.device, dtype=dtype or new.dtype
    )
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown
