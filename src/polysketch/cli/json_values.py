"""Whether a value that came as JSON fits the annotation of what it is for. Loads no PyTorch."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

_NUMBERS: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float)}


def fits(value: Any, annotation: Any) -> bool:
    """Whether JSON's value may be given: a list for a tuple, an object for a mapping.

    Anything fits an annotation without a rule here, such as a dataclass: that checks its fields itself.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    kind = origin or annotation
    if kind in (bool, str, types.NoneType):
        return isinstance(value, kind)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return isinstance(value, list) and _items_fit(value, arguments)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, dict)
    return True


def told(annotation: Any) -> str:
    """What fits, in words: `one of a, b` or the annotation as one writes it."""
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    return inspect.formatannotation(annotation)


def _items_fit(values: Sequence[Any], annotations: Sequence[Any]) -> bool:
    """Of a tuple's annotation: one and an ellipsis for any number of items, or one for each."""
    if len(annotations) == 2 and annotations[1] is Ellipsis:
        return all(fits(value, annotations[0]) for value in values)
    return not annotations or (len(values) == len(annotations) and all(map(fits, values, annotations)))
