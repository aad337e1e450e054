"""Any state of this library as its tensors: to copy a row of it, to make room for rows, to write it to a file."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from polysketch.attention import KeyValueRows, KeyValueState

__all__ = ["copy_rows_", "growing_parts", "mapped", "named_tensors", "shape_of"]


def mapped(state: Any, function: Callable[[Tensor], Tensor], growing: Callable[[Any], Any] = lambda part: part) -> Any:
    """A state like this one, with `function` of each tensor in its place; one tensor under two names stays one.

    Args:
        state: any.
        function: of a tensor.
        growing: of keys and values of all tokens (`growing_parts`), whose tensors are left alone. Default: they stay.
    """
    return _mapped(state, function, growing, {})


def named_tensors(state: Any) -> dict[str, Tensor]:
    """Path -> tensor, for instance `layers/0/sums`; without those of `growing_parts`."""
    return {path: value for path, value in _leaves(state, "") if isinstance(value, Tensor)}


def growing_parts(state: Any) -> dict[str, Any]:
    """Path -> keys and values of all tokens, a `KeyValueState` or `KeyValueRows`."""
    return {path: value for path, value in _leaves(state, "") if _grows(value)}


def shape_of(state: Any) -> dict[str, Any]:
    """All of a state but the numbers in its tensors: path -> shape, or the value where it is no tensor.

    Equal after one token and after two, but for `growing_parts`, which are left out: a state of constant size, whose
    rows may be at unlike positions.
    """
    leaves = [(path, value) for path, value in _leaves(state, "") if not _grows(value)]
    return {path: tuple(value.shape) if isinstance(value, Tensor) else value for path, value in leaves}


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


def _mapped(
    value: Any, function: Callable[[Tensor], Tensor], growing: Callable[[Any], Any], seen: dict[int, Tensor]
) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = function(value)
        return seen[id(value)]
    if isinstance(value, list):
        return [_mapped(each, function, growing, seen) for each in value]
    if _grows(value):
        return growing(value)
    if not _is_state(value):
        return value
    other = copy.copy(value)
    for name, each in vars(value).items():
        setattr(other, name, _mapped(each, function, growing, seen))
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


def _grows(value: Any) -> bool:
    return isinstance(value, KeyValueState | KeyValueRows)


def _is_state(value: Any) -> bool:
    """States say how many bytes they have, and tensors do too; the type is asked, for states count when they are."""
    return hasattr(type(value), "nbytes") and not isinstance(value, Tensor) and not _grows(value)
