"""Packages and tables that load a name when it is first asked for: what needs no torch then starts without it.

A package does it by a `__getattr__` of its own (PEP 562).
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

Entry = TypeVar("Entry")


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


class _Place(NamedTuple):
    module: str
    name: str


class TableOnDemand(MutableMapping[str, Entry]):
    """A table of what modules of a package define; a module is loaded when one of its entries is first asked for.

    The names alone (`in`, `len`, a loop) load nothing. It can be changed like a dictionary.

    Args:
        package: its dotted name.
        places: for each name where its entry is, the module and what it is called there: "softmax.SoftmaxAttention".
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        self._package = package
        self._entries: dict[str, _Place | Entry] = {name: _Place(*place.split(".")) for name, place in places.items()}

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[name]
        if isinstance(entry, _Place):
            entry = self._entries[name] = self._load(entry)
        return entry

    def _load(self, place: _Place) -> Entry:
        return getattr(importlib.import_module(f"{self._package}.{place.module}"), place.name)

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:  # the inherited one asks for the entry
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"

    def to_load(self) -> dict[str, list[str]]:
        """Under the name of each module what it defines of the entries that are not loaded: for `on_demand`."""
        names: dict[str, list[str]] = {}
        for entry in self._entries.values():
            if isinstance(entry, _Place):
                names.setdefault(entry.module, []).append(entry.name)
        return names
