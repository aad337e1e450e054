"""Breaking a function on purpose: one line of it replaced, for as long as a test runs."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import pytest


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the tests that must see it.

    Attributes:
        function: a function or method of the library.
        before: what stands in its source, once.
        after: what stands there instead.
        seen_by: tests, without arguments left, that must fail by then.
    """

    function: Callable
    before: str
    after: str
    seen_by: tuple[Callable[[], None], ...]


def apply(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Give the function the code of its mutant, wherever it has been imported to."""
    function = inspect.unwrap(mutant.function)
    patch.setattr(function, "__code__", _mutated(function, mutant.before, mutant.after).__code__)


def _mutated(function: Callable, before: str, after: str) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(before) == 1, f"{before!r} stands {source.count(before)} times in {function.__qualname__}"
    found: dict[str, FunctionType] = {}
    exec(compile(source.replace(before, after), "mutant", "exec"), dict(function.__globals__), found)
    return inspect.unwrap(found[function.__name__])
