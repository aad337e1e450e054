"""A small call of the delta rule by the programs and by the chunked backend."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.delta import operator
from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear import ask_programs_of_gradients
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.triton import self_check

_LENGTH = 150  # two chunks, and a last one that is not full


def programs_agree(inputs: Inputs, factors: int) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    call = {
        "features": inputs.key.shape[3],
        "width": inputs.value.shape[3],
        "factors": factors,
        "continued": inputs.sums is not None,
    }
    if torch.is_grad_enabled():
        ask_programs_of_gradients(inputs.key, inputs.value, factors=factors)
    return self_check.passed("delta_writes", inputs.key, call, partial(_errors, call, inputs.key))


def _errors(call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    run, definition = (partial(_write, call["factors"], backend) for backend in ("triton", "chunked"))
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


def _write(factors: int, backend: str, **given: Tensor) -> Tensor:
    return operator.writes(Inputs(**given), factors, backend)
