"""A small call of one query a row by the Triton program and by the definition."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check
from polysketch.ops.window import reference
from polysketch.ops.window.triton import attend_one
from polysketch.ops.window.types import Inputs, Plan

_KEYS, _SEEN = 150, 133  # more than one block of any size, the last not full
_ROWS = (2, 0)  # of three


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
