"""Packages that load a public name when it is first asked for: what needs no torch then starts without it (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_demand(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], Sequence[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
        package: its dotted name.
        names: under the name of each module of the package, the names that it gives. A module and a name that it gives
            are called differently, since an imported module is itself an attribute of the package.

    Returns:
        What the package assigns to `__getattr__` and `__dir__`, beside imports for type checkers.
    """
    home = {name: module for module, given in names.items() for name in given}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *home})
