"""Attention within windows by Triton programs, forward and backward: who is launched, on what.

Every program has a tile of queries, or of keys, of one head to itself, and goes through the other side's tokens that
reach it, in order: nothing is added atomically, so the same call gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block
from polysketch.ops.window.types import Inputs, Plan, computed_in

WIDEST = 128
"""Largest head_dim and value_dim: wider tiles do not fit the registers."""
Found = tuple[Tensor, Tensor, Tensor]


def why_not(inputs: Inputs) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    for tensor in inputs[:3]:
        dtype = computed_in(tensor)
        reason = triton.why_not(tensor if tensor.dtype == dtype else tensor.new_empty(0, dtype=dtype))
        if reason is not None:
            return reason
    widths = inputs.query.shape[3], inputs.value.shape[3]
    if not 1 <= min(widths) <= max(widths) <= WIDEST:
        return f"the triton backend takes vectors of 1 to {WIDEST}, got {widths[0]} and {widths[1]}"
    return None


def empty(query: Tensor, value_dim: int) -> Found:
    """Place for what `forward` finds; none in the last, for native programs keep two numbers of a query."""
    rows, kind = query.shape[:3], torch.float32
    return query.new_empty(*rows, value_dim), query.new_empty(rows, dtype=kind), query.new_empty(0, dtype=kind)


def forward(inputs: Inputs, plan: Plan) -> Found:
    """Output in the dtype of the query; and of each query, (batch, heads, n), the logarithm of its sum of weights."""
    from polysketch.ops.window.triton.programs.forward import window_forward

    call, found = _Call(inputs, plan), empty(inputs.query, inputs.value.shape[3])
    call.launch(window_forward, "ROWS", (*call.all, *found[:2]), (*call.strides, *call.beside_strides))
    return found


def backward(inputs: Inputs, plan: Plan, found: Found, upstream: Tensor) -> list[Tensor]:
    """Gradients of query, key, value and, if given, of the key beside, each in its dtype, from what `forward` gave."""
    from polysketch.ops.window.triton.programs import backward as programs

    call, (output, log_mass, _) = _Call(inputs, plan), found
    upstream = side_by_side(upstream.to(output.dtype))
    mean = torch.empty_like(log_mass)
    of_query, of_key, of_value, *of_beside = (x.new_empty(x.shape) for x in (*inputs[:3], *inputs[4:]) if x is not None)
    strides = upstream.stride()[:3]
    call.launch(
        programs.window_grad_query,
        "ROWS",
        (*call.all, output, log_mass, upstream, mean, of_query, *(of_beside or (None, None))),
        (*call.strides, *call.beside_strides, *strides),
    )
    call.launch(
        programs.window_grad_key_value,
        "KEYS",
        (*call.all[:4], log_mass, upstream, mean, of_key, of_value),
        (*call.strides, *strides),
    )
    return [of_query, of_key, of_value, *of_beside]


class _Call:
    """One call as launches have it."""

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        query, key, value = (side_by_side(x) for x in inputs[:3])
        mask, logit, beside = inputs[3:]
        mask = mask if mask is None or mask.stride(1) == 1 else mask.contiguous()
        beside = None if beside is None else side_by_side(beside)
        self.query, self.key, self.value, self.plan = query, key, value, plan
        self.all = query, key, value, mask, logit, beside
        self.strides = *(stride for x in (query, key, value) for stride in x.stride()[:3]), *_strides(mask, 1)
        self.beside_strides = *_strides(logit, 3), *_strides(beside, 3)

    def launch(self, kernel: Any, of: str, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]) -> None:
        """Launch over the tokens of all heads, by pieces of the size that `of` names, of queries or of keys."""
        use, plan = self.configuration(kernel.__name__), self.plan
        tokens = self.query if of == "ROWS" else self.key
        programs = tokens.shape[:2].numel() * -(-tokens.shape[2] // use[of])
        numbers = self.query.shape[2], self.key.shape[2], plan.behind, plan.ahead, plan.block, float(plan.scale)
        triton.launch(kernel, programs, *tensors, *strides, *numbers, configuration=use, **self.constants)

    def configuration(self, program: str) -> dict[str, int]:
        """The tuned constants of a program."""
        query, size = self.query, max(covering_block(x.shape[3]) for x in (self.query, self.value))
        dtype = str(query.dtype).removeprefix("torch.")
        return triton.configuration(
            program, query.device, dtype=dtype, precision=triton.precision(query.dtype), size=size
        )

    @property
    def constants(self) -> dict[str, Any]:
        """What programs are compiled for."""
        import triton.language as tl  # absolute: Triton, not this module

        query, key, value = self.query, self.key, self.value
        return {
            "KEY_HEADS": key.shape[1],
            "SHARED": query.shape[1] // key.shape[1],
            "HEAD": query.shape[3],
            "WIDTH": value.shape[3],
            "HEAD_BLOCK": covering_block(query.shape[3]),
            "WIDTH_BLOCK": covering_block(value.shape[3]),
            "BLOCKS": self.plan.block > 0,
            "PRECISION": triton.precision(query.dtype),
            "DOT": tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float32,
        }


def side_by_side(x: Tensor) -> Tensor:
    """The tensor with neighbouring entries of a vector side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides; zeros of what is not given."""
    return (0,) * count if x is None else x.stride()[:count]
