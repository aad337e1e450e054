"""The native backend: a window of softmax as a program in C++ (`ops/native/source`), on a CPU.

It computes in float32, of half precision too. 32 queries at a time look at the keys that any of them sees; one query,
as in decoding, has a program of its own. Every thread works through spans of queries of its own: all queries of a key
head, or a part of them where there are fewer key heads than threads.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polysketch.ops.native import TensorPointer, library
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.native.pairs import PAIRS_FIELDS, QUERIES, Pairs, PairsArguments
from polysketch.ops.parallel import num_workers
from polysketch.ops.window.types import Inputs, Plan

_INPUTS = ("query", "key", "value", "beside_logit", "beside_value")
_BESIDE = _INPUTS[3:]
_OUTPUTS = ("output", "peak", "mass")


class _Call(ctypes.Structure):
    """`WindowAttentionCall` of window_attention.h."""

    _fields_ = (
        *PAIRS_FIELDS,
        *((name, TensorPointer) for name in (*_BESIDE, *_OUTPUTS, "output_gradient")),
        *((f"{name}_gradient", TensorPointer) for name in _INPUTS),
    )


def why_not(inputs: Inputs) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    return why_no_program(inputs.query) or why_no_program(inputs.key) or why_no_program(inputs.value)


Found = tuple[Tensor, Tensor, Tensor]


def empty(query: Tensor, value_dim: int) -> Found:
    """Place for what `forward` finds, in float32."""
    rows, kind = query.shape[:3], torch.float32
    return (
        query.new_empty((*rows, value_dim), dtype=kind),
        query.new_empty(rows, dtype=kind),
        query.new_empty(rows, dtype=kind),
    )


def forward(inputs: Inputs, plan: Plan, key_rows: Tensor | None = None, into: Found | None = None) -> Found:
    """Output; and of each query, (batch, heads, n), the largest score and the sum of weights relative to it; float32.

    Args:
        inputs, plan: of the call.
        key_rows: (batch,) int64, the row of keys, values and mask that each row of queries has; None for its own.
        into: tensors of these shapes to write it into; new ones when None.
    """
    output, peak, mass = empty(inputs.query, inputs.value.shape[3]) if into is None else into
    query = inputs.query
    call = _arguments(inputs, plan)
    call.rows(output=output, peak=peak, mass=mass)
    call.point("key_rows", key_rows)
    programs = library()
    call.run(programs.window_attention_one if query.shape[2] == 1 else programs.window_attention_forward)
    return output, peak, mass


def backward(
    inputs: Inputs, plan: Plan, found: Found, upstream: Tensor, into: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """Gradients of query, key, value and, where there is one, of the logit and the value of the key beside; float32.

    Args:
        inputs, plan: of the forward call.
        found: what it gave; or where weights of other keys are in the same sums, what came of all.
        upstream: the gradient of its output.
        into: tensors of the inputs' shapes to write the gradients into; new ones when None.
    """
    given = {name: tensor for name in _INPUTS if (tensor := getattr(inputs, name)) is not None}
    unseen = inputs.key.shape[2] - inputs.query.shape[2] > plan.behind  # keys that the program writes no gradient of
    gradients = into or [
        (tensor.new_zeros if unseen and name in ("key", "value") else tensor.new_empty)(
            tensor.shape, dtype=torch.float32
        )
        for name, tensor in given.items()
    ]
    call = _arguments(inputs, plan)
    call.rows(**dict(zip(_OUTPUTS, found, strict=True)), output_gradient=upstream)
    call.rows(**{f"{name}_gradient": gradient for name, gradient in zip(given, gradients, strict=True)})
    call.run(library().window_attention_backward)
    return gradients


def _arguments(inputs: Inputs, plan: Plan) -> PairsArguments:
    pairs = Pairs(*inputs[:4], plan.behind, plan.ahead, plan.block)
    queries = inputs.query.shape[2]
    call = PairsArguments(_Call, pairs, plan.scale, lambda heads: _num_spans(heads, queries, plan))
    call.rows(**{name: tensor for name in _BESIDE if (tensor := getattr(inputs, name)) is not None})
    return call


def _num_spans(heads: int, queries: int, plan: Plan) -> int:
    """Spans of a key head, so that every thread has as many; none is short beside what its neighbours see of it."""
    threads = num_workers(torch.device("cpu"))
    shortest = max(QUERIES, 2 * (plan.behind + plan.ahead))
    return max(1, min(threads // math.gcd(heads, threads), queries // shortest))
