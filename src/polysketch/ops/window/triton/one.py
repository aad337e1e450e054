"""One query a row over a cache of many rows, as a Triton program."""

from torch import Tensor

from polysketch.ops.linear.triton.call import covering_block
from polysketch.ops.triton import availability, configuration, launch
from polysketch.ops.window.triton.launcher import side_by_side
from polysketch.ops.window.types import Inputs, Plan


def why_not(inputs: Inputs) -> str | None:
    """Why the program cannot take a call with tensors like these; None where it can."""
    return availability.why_not(inputs.query)


def attend_one(inputs: Inputs, plan: Plan, rows: Tensor) -> Tensor:
    """(batch, heads, 1, value_dim) of one query a row; keys, values and mask are read once, where they lie.

    Args:
        inputs, plan: of the call, checked; keys, values and mask have rows of their own.
        rows: (batch,) int64, which of them each row of queries has.
    """
    from polysketch.ops.window.triton.programs.one import window_one

    query, key, value = inputs.query[:, :, 0], side_by_side(inputs.key), side_by_side(inputs.value)
    query = query if query.stride(2) == 1 else query.contiguous()
    (batch, heads, width), value_width, keys = query.shape, value.shape[3], key.shape[2]
    logit, beside, mask = inputs.beside_logit, inputs.beside_value, inputs.key_mask
    beside = None if beside is None else side_by_side(beside)
    mask = mask if mask is None or mask.stride(1) == 1 else mask.contiguous()
    output = query.new_empty(batch, heads, value_width)
    launch(
        window_one,
        batch * heads,
        *(query, key, value, mask, logit, beside, rows, output),
        *(float(plan.scale), keys - 1 - plan.behind, keys, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3]),
        0 if mask is None else mask.stride(0),
        *((0, 0) if logit is None else logit.stride()[:2]),
        *((0, 0) if beside is None else beside.stride()[:2]),
        configuration=configuration("window_one", query.device, width=width, value_width=value_width),
        HEADS=heads,
        SHARED=heads // key.shape[1],
        WIDTH=width,
        VALUE_WIDTH=value_width,
        DEPTH=covering_block(width),
        COLUMNS=covering_block(value_width),
    )
    return output[:, :, None]
