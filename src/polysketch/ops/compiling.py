"""What torch.compile is told of a function, without the whole compiler being imported to tell it."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def asked_once(function: Function) -> Function:
    """Mark a function whose answer is a constant to torch.compile: it asks while it traces, and does not trace into it.

    This is the mark of `torch.compiler.assume_constant_result`, which would import the compiler: two seconds more
    whenever the library is loaded. A PyTorch that does not know the mark breaks the graph at a call.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
