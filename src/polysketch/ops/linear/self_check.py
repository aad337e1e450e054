"""A small call of linear attention by the programs and by the chunked backend, and tokens decoded by both."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.linear.aligned import attend
from polysketch.ops.linear.backends import BACKENDS
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.triton.decoding import extend_one_
from polysketch.ops.linear.triton.launches import spans_of
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, Plan
from polysketch.ops.triton import self_check

_LENGTH, _CHUNK = 150, 64  # chunks before, and a last one that is not full
_STEPS = 6  # tokens decoded, over the end of a chunk
_EXTEND = "linear_attention_extend"


def programs_agree(inputs: Inputs, plan: Plan) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    call = _described(inputs, plan)
    return self_check.passed("linear_attention", inputs.value, call, partial(_errors, call, inputs.value))


def steps_agree(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows) -> bool:
    """Whether the programs may be taken for tokens decoded on states like this one."""
    call = {**_described(inputs, plan), "chunk": state.local_chunk, "rows": state.rows is not None}
    call["sums"] = half_of(state)
    like = inputs.value.to(call["sums"] or inputs.value.dtype)
    with torch.no_grad():
        return self_check.passed(_EXTEND, inputs.value, call, lambda _: _step_errors(call, like))


def half_of(state: LinearAttentionState | StateRows) -> torch.dtype | None:
    """The half precision in which the sums are; None where they are in none."""
    return state.pool.sums.dtype if state.pool.rounds_sums else None


def _described(inputs: Inputs, plan: Plan) -> dict[str, Any]:
    local_key = inputs.local_key
    return {
        "features": inputs.key.shape[3],
        "width": inputs.value.shape[3],
        "inner": 0 if local_key is None else local_key.shape[3],
        "degree": 0 if local_key is None else plan.degree,
        "grouped": inputs.query.shape[1] != inputs.key.shape[1],
        "power": plan.power,
        "factors": plan.factors,
        "causal": plan.causal,
        "diagonal": plan.diagonal,
        "normalize": plan.normalize,
        "decays": inputs.log_decay is not None,
    }


def why_no_steps(device: torch.device) -> str | None:
    """Why a graph is not to capture the programs' steps; None where no step has disagreed."""
    if not self_check.known_bad(str(device), _EXTEND):
        return None
    return "programs in Triton disagreed with plain PyTorch in decoding on this device"


def _errors(call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    run, definition = (partial(_attend, call, backend) for backend in ("triton", "chunked"))
    given = _inputs(call, _LENGTH)
    found = self_check.disagreements(run, definition, given, like, backward=backward)
    if call["causal"]:  # a long sequence is cut, and how long it is is not asked here
        with spans_of(1):
            in_spans = self_check.disagreements(run, definition, given, like, backward=backward)
        found |= {f"{name}, in spans": error for name, error in in_spans.items()}
    return found


def _step_errors(call: dict[str, Any], like: Tensor) -> dict[str, float]:
    before = max(10, call["chunk"] - _STEPS // 2)

    def definition(**given: Tensor) -> Tensor:
        return _attend(call, "chunked", **given)[:, :, before:]

    run = partial(_decode, call, before)
    return self_check.disagreements(run, definition, _inputs(call, before + _STEPS), like, backward=False)


def _inputs(call: dict[str, Any], length: int) -> dict[str, Tensor]:
    """Weights of like size, sketched and exact."""
    heads = {"query": 2 if call["grouped"] else 1, "key": 1, "value": 1}
    widths = {"query": call["features"], "key": call["features"], "value": call["width"]}
    shapes: dict[str, tuple[int, ...]] = {name: (1, count, length, widths[name]) for name, count in heads.items()}
    if call["inner"]:
        shapes |= {f"local_{name}": (1, heads[name], length, call["inner"]) for name in ("query", "key")}
    if call["decays"]:
        shapes["log_decay"] = (1, 1, length)
    inputs = self_check.random_inputs(**shapes)
    for name in ("query", "key"):
        inputs[name] = inputs[name].abs() / call["features"] ** 0.5
        if call["inner"]:
            inputs[f"local_{name}"] /= call["inner"] ** 0.25
    if call["decays"]:
        inputs["log_decay"] = -0.05 * inputs["log_decay"].abs()
    return inputs


def _plan(call: dict[str, Any], *, return_state: bool = False) -> Plan:
    chunk = call.get("chunk") or _CHUNK
    options = (call["power"], call["factors"], call["causal"], 1.0, call["normalize"], call["degree"], chunk)
    return Plan(*options, call["diagonal"], return_state)


def _attend(call: dict[str, Any], backend: str, **given: Tensor) -> Tensor:
    return _attended(call, backend, Inputs(**given)).output


def _attended(
    call: dict[str, Any], backend: str, inputs: Inputs, *, return_state: bool = False
) -> LinearAttentionResult:
    return attend(BACKENDS[backend], inputs, _plan(call, return_state=return_state), None, None)


def as_a_row_of_others(state: LinearAttentionState) -> StateRows:
    """A state of one row as the middle one of three."""
    pool = state.reorder(state.position.new_zeros(3))
    return StateRows(pool, state.position.new_ones(1).to(state.sums.device), state.position.clone())


def _decode(call: dict[str, Any], before: int, **given: Tensor) -> Tensor:
    """The last tokens by the programs' steps, from the state that the chunked backend has after the others."""
    first = Inputs(**{name: x[:, :, :before] for name, x in given.items()})
    state = _attended(call, "chunked", first, return_state=True).state
    assert state is not None
    if call["sums"] is not None:
        state = state.with_sums_in(call["sums"])
    moved = as_a_row_of_others(state) if call["rows"] else state
    moved.device_position = moved.position.to(state.sums.device, copy=True)  # the programs' own, on a CPU too
    outputs = []
    for token in range(before, before + _STEPS):
        one = Inputs(**{name: x[:, :, token : token + 1] for name, x in given.items()})
        outputs.append(extend_one_(one, _plan(call), moved)[0])
    return torch.cat(outputs, 2)
