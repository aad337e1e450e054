"""Small calls by the Triton programs and by the definition: of a window, and of one query a row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check
from polysketch.ops.window import operator, reference
from polysketch.ops.window.triton import attend_one
from polysketch.ops.window.types import Inputs, Plan, computed_in

_KEYS, _SEEN = 150, 133  # more than one block of any size, the last not full
_ROWS = (2, 0)  # of three
_LENGTH, _WINDOW, _BLOCK = 300, 150, 70  # several tiles, of which some are seen as a whole; none divides another


def programs_agree(inputs: Inputs, plan: Plan, blocks: bool) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    query, dtype = inputs.query, computed_in(inputs.query)
    call = {
        "head_dim": query.shape[3],
        "value_dim": inputs.value.shape[3],
        "causal": plan.ahead == 0,
        "blocks": blocks,
        "masked": inputs.key_mask is not None,
        "grouped": query.shape[1] != inputs.key.shape[1],
        "beside": inputs.beside_logit is not None,
    }
    like = query if query.dtype == dtype else query.new_empty(0, dtype=dtype)
    return self_check.passed("window_attention", like, call, partial(_window_errors, call, like))


def _window_errors(call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    heads, width, value_width = (2 if call["grouped"] else 1), call["head_dim"], call["value_dim"]
    shapes: dict[str, tuple[int, ...]] = {"query": (1, heads, _LENGTH, width), "key": (1, 1, _LENGTH, width)}
    shapes |= {"value": (1, 1, _LENGTH, value_width)}
    if call["beside"]:
        shapes |= {"beside_logit": (1, heads, _LENGTH), "beside_value": (1, heads, _LENGTH, value_width)}
    run, definition = (
        partial(_attend_window, call, attend) for attend in (operator.attend_by_triton, reference.attend)
    )
    return self_check.disagreements(run, definition, self_check.random_inputs(**shapes), like, backward=backward)


def _attend_window(call: dict[str, Any], attend: Callable[[Inputs, Plan], Tensor], **given: Tensor) -> Tensor:
    device = given["query"].device
    mask = torch.arange(_LENGTH, device=device)[None] % 7 > 0 if call["masked"] else None
    block = _BLOCK if call["blocks"] else 0
    ahead = block - 1 if block else 0 if call["causal"] else _WINDOW - 1
    return attend(Inputs(**given, key_mask=mask), Plan(_WINDOW - 1, ahead, call["head_dim"] ** -0.5, block))


def program_agrees(inputs: Inputs) -> bool:
    """Whether the program may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    call = {
        "width": inputs.query.shape[3],
        "value_width": inputs.value.shape[3],
        "grouped": inputs.query.shape[1] != inputs.key.shape[1],
        "masked": inputs.key_mask is not None,
        "beside": inputs.beside_logit is not None,
    }
    with torch.no_grad():
        return self_check.passed("window_one", inputs.query, call, lambda _: _errors(call, inputs.query))


def _errors(call: dict[str, Any], like: Tensor) -> dict[str, float]:
    run, definition = (partial(_attend, call, by_program) for by_program in (True, False))
    return self_check.disagreements(run, definition, _tensors(call), like, backward=False)


def _tensors(call: dict[str, Any]) -> dict[str, Tensor]:
    heads = 2 if call["grouped"] else 1
    shapes: dict[str, tuple[int, ...]] = {"query": (len(_ROWS), heads, 1, call["width"])}
    shapes |= {"key": (3, 1, _KEYS, call["width"]), "value": (3, 1, _KEYS, call["value_width"])}
    if call["beside"]:
        shapes |= {"beside_logit": (len(_ROWS), heads, 1), "beside_value": (len(_ROWS), heads, 1, call["value_width"])}
    return self_check.random_inputs(**shapes)


def _attend(call: dict[str, Any], by_program: bool, **given: Tensor) -> Tensor:
    device = given["query"].device
    mask = (torch.arange(3 * _KEYS, device=device) % 7 > 0).unflatten(0, (3, _KEYS)) if call["masked"] else None
    rows, plan = torch.tensor(_ROWS, device=device), Plan(_SEEN - 1, 0, call["width"] ** -0.5)
    inputs = Inputs(**given, key_mask=mask)
    return attend_one(inputs, plan, rows) if by_program else reference.attend(inputs.taken(rows), plan)
