"""What a call consists of: the public key beside a window, and records that backends receive."""

from typing import NamedTuple

import torch
from torch import Tensor


class BesideKey(NamedTuple):
    """One more key for every query, beside those of its window, with a logit and a value of its own.

    Attributes:
        logit: (batch, heads, length), as it stands in the softmax; -inf for none.
        value: (batch, heads, length, value_dim).
    """

    logit: Tensor
    value: Tensor


class Inputs(NamedTuple):
    """The tensors of one call, checked; see `polysketch.ops.sliding_window_attention`.

    Attributes:
        query: (batch, heads, n, head_dim); query i stands at position m - n + i of the keys.
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        key_mask: (batch, m) bool, or None.
        beside_logit, beside_value: of the key beside, both or neither.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    beside_logit: Tensor | None = None
    beside_value: Tensor | None = None

    def taken(self, rows: Tensor) -> "Inputs":
        """With these rows of key, value and mask, copied."""
        mask = None if self.key_mask is None else self.key_mask.index_select(0, rows)
        return self._replace(key=self.key.index_select(0, rows), value=self.value.index_select(0, rows), key_mask=mask)

    def check_same_rows(self) -> None:
        """Refuse a key, value and mask of unlike numbers of rows: a program reads the row that it is told of each.

        Raises:
            ValueError: naming the first that has other rows than the key, or none.
        """
        if self.query.dim() != 4 or self.key.dim() != 4:
            shapes = tuple(self.query.shape), tuple(self.key.shape)
            raise ValueError(f"query and key must be (batch, heads, length, width), got the shapes {shapes}")
        for name, tensor in (("value", self.value), ("key_mask", self.key_mask)):
            if tensor is not None and tensor.shape[:1] != self.key.shape[:1]:
                raise ValueError(
                    f"expected a {name} of {len(self.key)} rows, as the key has, got the shape {tuple(tensor.shape)}"
                )

    def in_rows_like(self, query: Tensor) -> "Inputs":
        """With one row of key, value and mask for each of the query's, no matter which: to check sizes."""
        key, value = (x[:1].expand(len(query), *x.shape[1:]) for x in (self.key, self.value))
        mask = None if self.key_mask is None else self.key_mask[:1].expand(len(query), -1)
        return self._replace(key=key, value=value, key_mask=mask)


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype of PyTorch's attention kernels, which autocast chooses for all but float64."""
    device = tensor.device.type
    cast = device != "meta" and torch.is_autocast_enabled(device) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else tensor.dtype


class Plan(NamedTuple):
    """The options of one call.

    Attributes:
        behind: keys before its own position that a query sees, less than there are keys.
        ahead: keys after it.
        scale: factor on q . k.
        block: tokens of a block, counted from the first query, beyond the end of which no query sees; 0 for none.
    """

    behind: int
    ahead: int
    scale: float
    block: int = 0

    def seen(self, rows: range, keys: range, device: torch.device) -> Tensor:
        """(rows, keys) bool of what is seen, by the positions of queries and keys, the first query's being 0."""
        of_rows, of_keys = (torch.arange(x.start, x.stop, device=device) for x in (rows, keys))
        age = of_rows[:, None] - of_keys
        near = (age <= self.behind) & (age >= -self.ahead)
        if self.block:
            near &= (of_rows // self.block)[:, None] >= of_keys // self.block
        return near
