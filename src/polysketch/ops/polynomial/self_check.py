"""A small call of polynomial attention by the programs and by the blockwise backend."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check

_LENGTH = 150  # several blocks, and a last one that is not full

Attend = Callable[..., Tensor]


def programs_agree(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, degree: int, causal: bool, masked: bool
) -> bool:
    """Whether the programs may be taken for calls with these widths and options; see `ops.triton.self_check`.

    Args:
        attend: `polynomial_attention`, which calls this.
    """
    call = {
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "degree": degree,
        "causal": causal,
        "masked": masked,
        "grouped": query.shape[1] != key.shape[1],
    }
    return self_check.passed("polynomial_attention", query, call, partial(_errors, attend, call, query))


def _errors(attend: Attend, call: dict[str, Any], like: Tensor, backward: bool) -> dict[str, float]:
    width = call["head_dim"]
    inputs = self_check.random_inputs(
        query=(1, 2 if call["grouped"] else 1, _LENGTH, width),
        key=(1, 1, _LENGTH, width),
        value=(1, 1, _LENGTH, call["value_dim"]),
    )
    for name in ("query", "key"):
        inputs[name] = inputs[name] / width**0.25
    mask = torch.arange(_LENGTH, device=like.device)[None] >= _LENGTH // 3 if call["masked"] else None
    options = {"degree": call["degree"], "causal": call["causal"], "key_mask": mask}
    run, definition = (partial(attend, **options, backend=name) for name in ("triton", "blockwise"))
    return self_check.disagreements(run, definition, inputs, like, backward=backward)
