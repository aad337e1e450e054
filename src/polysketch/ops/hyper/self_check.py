"""A small call of HyperAttention by the programs and by all weights at once, of the same meetings."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.hyper import definition
from polysketch.ops.hyper.approximate import Options
from polysketch.ops.hyper.calls import who_meets_whom
from polysketch.ops.hyper.operator import hyper_attention_operator
from polysketch.ops.hyper.types import Given
from polysketch.ops.triton import self_check

_LENGTH, _BLOCK = 150, 33  # blocks that are not full, and three sizes of spans
_CHUNK, _SAMPLES, _BITS = 20, 24, 4


def programs_agree(query: Tensor, key: Tensor, value: Tensor, causal: bool, masked: bool) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`."""
    call = {
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "causal": causal,
        "masked": masked,
        "grouped": query.shape[1] != key.shape[1],
    }
    return self_check.passed("hyper_attention", query, call, partial(_errors, call, query))


def _errors(call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    heads, width = (2 if call["grouped"] else 1), call["head_dim"]
    inputs = self_check.random_inputs(
        query=(1, heads, _LENGTH, width), key=(1, 1, _LENGTH, width), value=(1, 1, _LENGTH, call["value_dim"])
    )
    given = _prepared(call, **inputs)
    run, definition_of = (partial(one, given, like.device) for one in (_by_programs, _by_definition))
    return self_check.disagreements(run, definition_of, inputs, like, backward=backward)


def _prepared(call: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Given:
    """Who meets whom, once for both sides: another precision may choose other keys."""
    real = torch.arange(_LENGTH)[None] % 7 > 0 if call["masked"] else None
    planes = self_check.random_inputs(planes=(query.shape[3], _BITS))["planes"]
    scale = query.shape[3] ** -0.5
    options = Options(planes, _CHUNK, _SAMPLES, "uniform", 0, scale)
    met = who_meets_whom(query, key, real, call["causal"], _BLOCK, options)
    return Given(query, key, value, real, met, _BLOCK if call["causal"] else 0, scale)


def _by_programs(given: Given, device: torch.device, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query_places, key_places, log_weights = (x.to(device) for x in given.met[:3])
    lists = (query_places, key_places, log_weights.float(), given.met.parts)
    real = None if given.real is None or not given.block else given.real.to(device)
    return hyper_attention_operator(query, key, value, real, *lists, given.block, given.scale, "triton")[0]


def _by_definition(given: Given, device: torch.device, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    met = given.met._replace(**{name: x.to(device) for name, x in given.met._asdict().items() if name != "parts"})
    real = None if given.real is None else given.real.to(device)
    return definition.attend(given._replace(query=query, key=key, value=value, real=real, met=met))
