"""The states of many requests in memory that somebody else allots: a page of bytes for each request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from polysketch.attention import RecentTokens
from polysketch.attention.heavy_state import HeavyState
from polysketch.ops import LinearAttentionState, StateRows

_ALIGNMENT = 64
"""Bytes: where a tensor begins in a page, so that any dtype and any vector instruction may read it there."""
_SHORT, _LONG = 1, 257
"""Tokens. A state that has other sizes after so many grows; the longer must be beyond the first room of any store."""


@dataclass(frozen=True)
class PageLayout:
    """Where the tensors of one row's state stand in a page.

    Attributes:
        shapes: of each tensor, without rows.
        dtypes: of each.
        offsets: bytes before each.
        nbytes: of the whole page.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PageLayout:
        """The layout of tensors (rows, ...), in their order."""
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            size = tensor[:1].numel() * tensor.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(tuple(x.shape[1:]) for x in tensors), tuple(x.dtype for x in tensors), tuple(offsets), end)

    def views(self, pages: Tensor) -> list[Tensor]:
        """(pages, at least nbytes) bytes -> each tensor (pages, ...), in the same memory."""
        found = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            size = prod(shape) * dtype.itemsize
            found.append(pages[:, offset : offset + size].view(dtype).unflatten(1, shape or (1,)))
            if not shape:
                found[-1] = found[-1][:, 0]
        return found


class StateSlots:
    """The states of one layer of a model, of which each request has its own in a page.

    A state is read, moved on by the layer, and written back. That of a single request is read as views of its page, and
    moves on there. Of several requests sums and windows move on in their pages too: programs take the number of every
    page. The small rest, and states of other kinds, are gathered and scattered.

    Args:
        init_state: gives the state of so many rows before the first token.
        move_on: moves a state on by (rows, length) tokens of zeros; to find out what the state holds then.

    Attributes:
        layout: of a page.

    Raises:
        ValueError: a state that grows with the tokens.
    """

    def __init__(self, init_state: Callable[[int], Any], move_on: Callable[[Any, int], Any]) -> None:
        self._init_state = init_state
        self._example = move_on(init_state(1), _SHORT)
        self.layout = PageLayout.of(list(tensors_of(self._example)))
        longer = PageLayout.of(list(tensors_of(move_on(init_state(1), _LONG))))
        if longer != self.layout:
            raise ValueError(
                f"expected a state of constant size, found {self.layout.nbytes} bytes after {_SHORT} token and "
                f"{longer.nbytes} after {_LONG}"
            )
        self._all: Any = None

    def bind(self, pages: Tensor) -> None:
        """Keep states in these (pages, bytes) from now on, uint8 or int8."""
        nobody = torch.zeros(len(pages), dtype=torch.int64, device="cpu")
        self._all = _with_tensors(self._example, iter(self.layout.views(pages)), nobody)

    def fresh(self, rows: int) -> Any:
        """The state of so many rows before the first token."""
        return self._init_state(rows)

    def read(self, pages: Sequence[int], position: Tensor) -> Any:
        """The state of some requests.

        Args:
            pages: that of each.
            position: (rows,) int64 in host memory, the tokens that each has seen.
        """
        if len(pages) == 1:
            views = (tensor[pages[0] : pages[0] + 1] for tensor in tensors_of(self._all))
            return _with_tensors(self._example, views, position)
        first = next(tensors_of(self._all), position)
        return _some_rows(self._all, torch.tensor(pages, device=first.device), position)

    def write(self, pages: Sequence[int], state: Any) -> None:
        """Keep the state of these requests; what moved on in its page is there."""
        for kept, new in _gathered(self._all, state):
            if len(pages) > 1:
                kept[torch.tensor(pages, device=kept.device)] = new
            elif kept[pages[0]].data_ptr() != new.data_ptr():
                kept[pages[0]] = new[0]


def tensors_of(state: Any) -> Iterator[Tensor]:
    """The tensors (rows, ...) of a state and of the states within it, positions left out, always in the same order."""
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            if name not in _POSITIONS:
                yield value
        elif _is_state(value):
            yield from tensors_of(value)


_POSITIONS = ("position", "device_position")
"""Tokens seen, which whoever keeps the pages knows: in host memory, and the same in the device's."""


def _is_state(value: Any) -> bool:
    return hasattr(value, "reorder") and not isinstance(value, Tensor)


def _with_tensors(example: Any, tensors: Iterator[Tensor], position: Tensor) -> Any:
    """A state like `example` with these tensors, and positions of its own."""
    state = copy.copy(example)
    for name, value in vars(example).items():
        if isinstance(value, Tensor) and name not in _POSITIONS:
            setattr(state, name, next(tensors))
        elif _is_state(value):
            setattr(state, name, _with_tensors(value, tensors, position))
    _set_position(state, position)
    return state


def _some_rows(pool: Any, rows: Tensor, position: Tensor) -> Any:
    """The state of these rows of all: sums and windows where they lie, a copy of all else."""
    if isinstance(pool, LinearAttentionState):
        return StateRows(pool, rows, position.clone())
    if isinstance(pool, RecentTokens):
        return RecentTokens.rows_of(pool, rows, position.clone())
    if isinstance(pool, HeavyState):  # looks into the open chunk of its sums by itself
        return _with_tensors(pool, (tensor.index_select(0, rows) for tensor in tensors_of(pool)), position)
    state = copy.copy(pool)
    for name, value in vars(pool).items():
        if isinstance(value, Tensor) and name not in _POSITIONS:
            setattr(state, name, value.index_select(0, rows))
        elif _is_state(value):
            setattr(state, name, _some_rows(value, rows, position))
    _set_position(state, position)
    return state


def _gathered(pool: Any, state: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows of each tensor, and what a state of some of them has, where that is not in its place."""
    if isinstance(state, StateRows) or (isinstance(state, RecentTokens) and state.rows is not None):
        return
    for name, value in vars(pool).items():
        if isinstance(value, Tensor) and name not in _POSITIONS:
            yield value, getattr(state, name)
        elif _is_state(value):
            yield from _gathered(value, getattr(state, name))


def _set_position(state: Any, position: Tensor) -> None:
    """Give a state positions of its own, and those of its device where it has them."""
    if "position" in vars(state):
        state.position = position.clone()
    if "device_position" in vars(state):
        device = state.device_position.device
        state.device_position = state.position if device == state.position.device else state.position.to(device)
