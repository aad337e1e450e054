"""Formulas for PyTorch's counter of operations, which are handed over when the counter is loaded, and not before.

`torch.utils.flop_counter` loads Triton, which takes as long as all ops of this library together and which few programs
need. So the import of the counter is waited for, in whatever order a program imports it and us.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Formula = TypeVar("Formula", bound=Callable[..., int])

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def counts_operations_of(operator: Any) -> Callable[[Formula], Formula]:
    """Give `FlopCounterMode` the decorated formula: shapes of an operator's arguments -> operations of a call.

    Args:
        operator: for instance `torch.ops.polysketch.linear_attention`.
    """

    def note(formula: Formula) -> Formula:
        _waiting.append((operator, formula))
        if _COUNTER in sys.modules:
            _hand_over(sys.modules[_COUNTER])
        return formula

    return note


def _hand_over(counter: ModuleType) -> None:
    while _waiting:
        operator, formula = _waiting.pop(0)
        counter.register_flop_formula(operator)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before the other finders until the counter is asked for, and finds it by them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As any finder: None for all other modules."""
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the counter as its own loader does, and hands the formulas over."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader, then the formulas."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _hand_over(module)


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Finder())
