"""The next token of every row by the delta rule, as one Triton program that moves the sums on where they lie."""

import torch
from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear.state import HALF, LinearAttentionState
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import availability, configuration, launch


def why_not_extend(key: Tensor, state: LinearAttentionState | StateRows) -> str | None:
    """Why the program cannot take keys like these and this state; None where it can."""
    pool = state.pool
    if pool.sums.dtype not in (torch.float32, *HALF):
        return f"the triton backend decodes states in float32 and half precision, got {pool.sums.dtype}"
    if not pool.sums[:1].is_contiguous() or not pool.normalizer[:1].is_contiguous():
        return "the triton backend decodes states whose tensors have every row in one piece"
    return availability.why_not(key)


def extend_one_(query: Tensor, inputs: Inputs, state: LinearAttentionState | StateRows, factors: int) -> Tensor:
    """What the sums answer each query once its token is written: (batch, heads, 1, value_dim).

    Args:
        query, inputs: one token of every row, checked, in float32.
        state: moves on in place, by one launch; nothing waits for the device.
        factors: as in `delta_writes`.
    """
    from polysketch.ops.delta.triton.programs.extend import delta_extend

    query, key, value = (_one_token(x) for x in (query, *inputs[:2]))
    strength, pool = inputs.strength[:, :, 0], state.pool
    (batch, heads, features), key_heads, width = query.shape, key.shape[1], value.shape[2]
    use = configuration("delta_extend", value.device, features=features, width=width, factors=factors)
    use["COLUMNS"] = min(use["COLUMNS"], covering_block(width))
    output = value.new_empty(batch, heads, width)
    launch(
        delta_extend,
        batch * key_heads * num_blocks(width, use["COLUMNS"]),
        *(query, key, value, strength, pool.sums, pool.normalizer, state.rows, output),
        *(pool.sums.stride(0), pool.normalizer.stride(0)),
        *(stride for x in (query, key, value, strength) for stride in x.stride()[:2]),
        configuration=use,
        KEY_HEADS=key_heads,
        SHARED=heads // key_heads,
        FEATURES=features,
        FACTORS=factors,
        WIDTH=width,
    )
    state.advance_()
    return output[:, :, None]


def _one_token(x: Tensor) -> Tensor:
    """Without the dimension of tokens, and with entries side by side."""
    token = x[:, :, 0]
    return token if token.stride(2) == 1 or token.shape[2] == 1 else token.contiguous()
