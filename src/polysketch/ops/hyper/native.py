"""The native backend: exact blocks and tiles of sorted and drawn keys as programs in C++, float32 on a CPU.

Every query has one sum of weights, which goes from its own block to all the tiles it is in; nothing of the size of a
tile's scores is kept. Backward makes weights again from the sums as they were at the end.
"""

import ctypes
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from polysketch.ops.hyper.types import Given
from polysketch.ops.native import TensorPointer, library, run_in_threads
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.parallel import num_workers
from polysketch.ops.window import native as window
from polysketch.ops.window.types import Inputs, Plan

_SIZES = ("heads", "key_heads", "queries", "width", "value_width", "tiles", "rows", "keys", "parts")
_INPUTS = ("query", "key", "value")
_LISTS = ("query_places", "key_places", "log_weights")
_FOUND = ("output", "peak", "mass")
_LOWEST = -1e29  # kLowest of running_softmax.h: the largest score of a query that has seen nothing


def why_not(query: Tensor, value: Tensor) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    if not (query.shape[-1] and value.shape[-1]):
        return "the native backend takes heads of one number at least"
    return why_no_program(query) or why_no_program(value)


class _Call(ctypes.Structure):
    """`TileAttentionCall` of tile_attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        *((name, TensorPointer) for name in _INPUTS),
        *((name, ctypes.c_void_p) for name in _LISTS),
        *((name, TensorPointer) for name in (*_FOUND, "output_gradient")),
        *((f"{name}_gradient", TensorPointer) for name in _INPUTS),
    )


def _blocks(given: Given) -> Iterator[tuple[slice, Plan, Inputs]]:
    """The tokens of each block, and a call of the window's programs for them."""
    length = given.query.shape[2]
    for start in range(0, length if given.block else 0, max(given.block, 1)):
        part = slice(start, min(start + given.block, length))
        mask = None if given.real is None else given.real[:, part]
        inputs = Inputs(given.query[:, :, part], given.key[:, :, part], given.value[:, :, part], mask)
        yield part, Plan(part.stop - part.start - 1, 0, given.scale), inputs


def forward(given: Given) -> window.Found:
    """Output; and of each query, (batch, heads, n), the largest score and the sum of weights relative to it."""
    output, peak, mass = found = window.empty(given.query, given.value.shape[3])
    if not given.block:
        for tensor, start in zip(found, (0.0, _LOWEST, 0.0), strict=True):
            tensor.fill_(start)
    for part, plan, inputs in _blocks(given):
        window.forward(inputs, plan, into=(output[:, :, part], peak[:, :, part], mass[:, :, part]))
    threads, heads = num_workers(given.query.device), len(given.key) * given.key.shape[1]
    _run("forward", given, threads // math.gcd(heads, threads), dict(zip(_FOUND, found, strict=True)))
    return found


def backward(given: Given, found: window.Found, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from what `forward` gave and the gradient of its output."""
    new = torch.empty if given.block else torch.zeros  # blocks write all of them first
    of_query, of_key, of_value = gradients = [
        new(x.shape, dtype=x.dtype, device=x.device) for x in given.tensors.values()
    ]
    output, peak, mass = found
    for part, plan, inputs in _blocks(given):
        of_part = (output[:, :, part], peak[:, :, part], mass[:, :, part])
        window.backward(inputs, plan, of_part, upstream[:, :, part], into=[x[:, :, part] for x in gradients])
    names = [f"{name}_gradient" for name in ("output", *_INPUTS)]
    _run("backward", given, 1, dict(zip((*_FOUND, *names), (*found, upstream, *gradients), strict=True)))
    return of_query, of_key, of_value


def _run(program: str, given: Given, parts: int, others: dict[str, Tensor]) -> None:
    """Run a program on all key heads, or on parts of their queries, dealt out to the threads."""
    query, key, value = given[:3]
    sizes = (query.shape[1], key.shape[1], query.shape[2], key.shape[3], value.shape[3])
    call = _Call(*sizes, *given.met.query.shape[2:], given.met.key.shape[3], parts, given.scale)
    rows = {name: _in_rows(x) for name, x in (given.tensors | others).items()}
    lists = {name: x.contiguous() for name, x in zip(_LISTS, given.met[:3], strict=True)}
    for name, tensor in rows.items():
        setattr(call, name, TensorPointer.of(tensor))
    for name, tensor in lists.items():
        setattr(call, name, tensor.data_ptr())
    units = len(query) * key.shape[1] * parts
    kept = [*rows.values(), *lists.values()]
    run_in_threads(getattr(library(), f"tile_attention_{program}"), call, units, kept)


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a token side by side."""
    return x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()
