"""A small call of linear attention by the programs and by the chunked backend, and tokens decoded by both."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.linear.aligned import aligned_attention
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.triton_decode import extend_one_
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial
from polysketch.ops.triton import self_check

_LENGTH, _CHUNK = 150, 64  # chunks before, and a last one that is not full
_STEPS = 6  # tokens decoded, over the end of a chunk
_EXTEND = "linear_attention_extend"


def programs_agree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    power: int,
    causal: bool,
    normalize: bool,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    call = {
        "features": query.shape[3],
        "width": value.shape[3],
        "inner": 0 if local is None else local.query.shape[3],
        "degree": 0 if local is None else local.degree,
        "grouped": query.shape[1] != key.shape[1],
        "power": power,
        "causal": causal,
        "normalize": normalize,
        "decays": log_decay is not None,
    }
    return self_check.passed("linear_attention", value, call, partial(_errors, call, value))


def steps_agree(
    query: Tensor,
    value: Tensor,
    state: LinearAttentionState,
    *,
    normalize: bool,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
) -> bool:
    """Whether the programs may be taken for tokens decoded on states like this one."""
    call = {
        "features": query.shape[3],
        "width": value.shape[3],
        "inner": state.open_key.shape[3],
        "degree": 0 if local is None else local.degree,
        "grouped": query.shape[1] != state.sums.shape[1],
        "power": state.power,
        "causal": True,
        "normalize": normalize,
        "decays": log_decay is not None,
        "chunk": state.local_chunk,
    }
    with torch.no_grad():
        return self_check.passed(_EXTEND, value, call, lambda _: _step_errors(call, value))


def why_no_steps(device: torch.device) -> str | None:
    """Why a graph is not to capture the programs' steps; None where no step has disagreed."""
    if not self_check.known_bad(str(device), _EXTEND):
        return None
    return "programs in Triton disagreed with plain PyTorch in decoding on this device"


def _errors(call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    run, definition = (partial(_attend, call, backend) for backend in ("triton", "chunked"))
    return self_check.disagreements(run, definition, _inputs(call, _LENGTH), like, backward=backward)


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


def _attend(call: dict[str, Any], backend: str, **given: Tensor) -> Tensor:
    return _attended(call, backend, **given).output


def _attended(
    call: dict[str, Any],
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    return_state: bool = False,
    **given: Tensor,
) -> LinearAttentionResult:
    return aligned_attention(
        query,
        key,
        value,
        power=call["power"],
        causal=call["causal"],
        offset=1.0,
        normalize=call["normalize"],
        local=_local(call, **given),
        log_decay=given.get("log_decay"),
        key_mask=None,
        state=None,
        return_state=return_state,
        chunk_size=_CHUNK,
        backend=backend,
    )


def _local(call: dict[str, Any], **given: Tensor) -> LocalPolynomial | None:
    if not call["inner"]:
        return None
    return LocalPolynomial(given["local_query"], given["local_key"], call["degree"], call.get("chunk", _CHUNK))


def _decode(call: dict[str, Any], before: int, **given: Tensor) -> Tensor:
    """The last tokens by the programs' steps, from the state that the chunked backend has after the others."""
    read = _attended(call, "chunked", return_state=True, **{name: x[:, :, :before] for name, x in given.items()})
    state = read.state
    assert state is not None
    state.device_position = state.position.to(state.sums.device, copy=True)  # the programs' own, on a CPU too
    outputs = []
    for token in range(before, before + _STEPS):
        one = {name: x[:, :, token : token + 1] for name, x in given.items()}
        local, decay = _local(call, **one), one.get("log_decay")
        options = {"offset": 1.0, "normalize": call["normalize"], "local": local, "log_decay": decay}
        outputs.append(extend_one_(one["query"], one["key"], one["value"], state, **options))
    return torch.cat(outputs, 2)
