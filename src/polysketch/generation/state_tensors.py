"""Any state of this library as its tensors: to copy a row of it, to make room for rows, to write it to a file."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["copy_rows_", "mapped", "named_tensors", "shape_of"]


def mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state like this one, with `function` of each tensor in its place; one tensor under two names stays one."""
    return _mapped(state, function, {})


def named_tensors(state: Any) -> dict[str, Tensor]:
    """Path -> tensor, for instance `layers/0/sums`."""
    return {path: value for path, value in _leaves(state, "") if isinstance(value, Tensor)}


def shape_of(state: Any) -> dict[str, Any]:
    """All of a state but the numbers in its tensors: path -> shape, or the value where it is no tensor.

    Equal after one token and after two: a state of constant size, whose rows may be at unlike positions.
    """
    return {path: tuple(value.shape) if isinstance(value, Tensor) else value for path, value in _leaves(state, "")}


def copy_rows_(target: Any, rows: slice, source: Any) -> None:
    """Overwrite rows of a state, at the same addresses.

    Args:
        target: a state.
        rows: which of its rows.
        source: a state of as many rows; tensors that are these rows already are left alone.
    """
    new = named_tensors(source)
    for path, tensor in named_tensors(target).items():
        part = tensor[rows]
        if part.data_ptr() != new[path].data_ptr():
            part.copy_(new[path])


def _mapped(value: Any, function: Callable[[Tensor], Tensor], seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = function(value)
        return seen[id(value)]
    if isinstance(value, list):
        return [_mapped(each, function, seen) for each in value]
    if not _is_state(value):
        return value
    other = copy.copy(value)
    for name, each in vars(value).items():
        setattr(other, name, _mapped(each, function, seen))
    return other


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}/{index}")
    elif _is_state(value):
        for name, each in vars(value).items():
            yield from _leaves(each, f"{path}/{name}" if path else name)
    else:
        yield path, value


def _is_state(value: Any) -> bool:
    """States say how many bytes they have, and tensors do too."""
    return hasattr(value, "nbytes") and not isinstance(value, Tensor)
