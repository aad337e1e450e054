"""A small call of the delta rule by the programs and by the chunked backend."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.delta import operator
from polysketch.ops.delta.triton.decoding import extend_one_
from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear import LinearAttentionState, StateRows, ask_programs_of_gradients, linear_attention
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.linear.self_check import as_a_row_of_others, half_of
from polysketch.ops.triton import self_check

_LENGTH = 150  # two chunks, and a last one that is not full
_STEPS = 6  # tokens decoded


def programs_agree(inputs: Inputs, factors: int, half: torch.dtype | None) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    like, value = (x if half is None else x[:, :, :1].to(half) for x in inputs[:2])
    call = {
        "features": inputs.key.shape[3],
        "width": inputs.value.shape[3],
        "factors": factors,
        "continued": inputs.sums is not None,
    }
    if torch.is_grad_enabled():
        aligned = half is not None and inputs.sums is None
        ask_programs_of_gradients(like, operator.aligned_columns(value) if aligned else value, factors=factors)
    return self_check.passed("delta_writes", like, call, partial(_errors, call, like, half))


def steps_agree(query: Tensor, inputs: Inputs, factors: int, state: LinearAttentionState | StateRows) -> bool:
    """Whether the program of one token may be taken for states like this one."""
    call = {
        "features": inputs.key.shape[3],
        "width": inputs.value.shape[3],
        "factors": factors,
        "grouped": query.shape[1] != inputs.key.shape[1],
        "continued": False,
        "rows": state.rows is not None,
        "sums": half_of(state),
    }
    like = inputs.key.to(call["sums"] or inputs.key.dtype)
    with torch.no_grad():
        return self_check.passed("delta_attention_extend", inputs.key, call, lambda _: _step_errors(call, like))


def _step_errors(call: dict[str, Any], like: Tensor) -> dict[str, float]:
    given = {name: x[:, :, :_STEPS] for name, x in _inputs(call).items()}
    heads = 2 if call["grouped"] else 1
    given["query"] = self_check.random_inputs(query=(1, heads, _STEPS, call["features"]))["query"]
    run, definition = partial(_decode, call), partial(_attend, call["factors"])
    return self_check.disagreements(run, definition, given, like, backward=False)


def _attend(factors: int, query: Tensor, **given: Tensor) -> Tensor:
    written = _write(factors, "chunked", None, **given)
    options: dict[str, Any] = {"factors": factors, "normalize": False, "causal": True, "backend": "chunked"}
    return linear_attention(query, given["key"], written, **options).output


def _decode(call: dict[str, Any], query: Tensor, **given: Tensor) -> Tensor:
    """Token by token, from sums of zero."""
    sizes, factors = (1, 1, call["features"], call["width"]), call["factors"]
    query, given = query.float(), {name: x.float() for name, x in given.items()}
    state = LinearAttentionState.init(*sizes, factors=factors, device=query.device, sums_dtype=call["sums"])
    moved = as_a_row_of_others(state) if call["rows"] else state
    tokens = range(query.shape[2])
    steps = [Inputs(**{name: x[:, :, token : token + 1] for name, x in given.items()}) for token in tokens]
    return torch.cat([extend_one_(query[:, :, i : i + 1], steps[i], moved, factors) for i in tokens], 2)


def _errors(call: dict[str, Any], like: Tensor, half: torch.dtype | None, backward: bool) -> dict[str, float]:
    run = partial(_write, call["factors"], "triton", half)
    definition = partial(_write, call["factors"], "chunked", None)
    return self_check.disagreements(run, definition, _inputs(call), like, backward=backward)


def _inputs(call: dict[str, Any]) -> dict[str, Tensor]:
    """Keys of length one, so that nothing grows, which share a direction, so that tokens hear of one another."""
    features, width, factors = call["features"], call["width"], call["factors"]
    shapes: dict[str, tuple[int, ...]] = {"key": (1, 1, _LENGTH, features), "value": (1, 1, _LENGTH, width)}
    shapes["strength"] = (1, 1, _LENGTH)
    if call["continued"]:
        shapes["sums"] = (1, 1, expanded_size(features, 1, factors), width)
    inputs = self_check.random_inputs(**shapes)
    inputs["key"] = F.normalize((inputs["key"] + 0.5).unflatten(-1, (factors, -1)), dim=-1).flatten(-2)
    inputs["strength"] = inputs["strength"].sigmoid()
    return inputs


def _write(factors: int, backend: str, half: torch.dtype | None, **given: Tensor) -> Tensor:
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in given.items()}
    return operator.writes(Inputs(**wide), factors, backend, half)
