"""One token of every row against a state, as two Triton programs that update the state where it lies.

The positions that decide about chunks are read on the device: nothing waits for it, and a graph can be captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import Operator
from polysketch.ops.linear.state import HALF, LinearAttentionState
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.types import Inputs, Plan
from polysketch.ops.triton import configuration, launch, precision, why_not

_STATE = ("sums", "normalizer", "log_decay", "open_features", "open_value", "open_key", "open_log_decay")


def why_not_extend(value: Tensor, state: LinearAttentionState | StateRows) -> str | None:
    """Why the programs cannot take values like these and this state; None where they can."""
    pool = state.pool
    if pool.sums.dtype not in (torch.float32, *HALF):
        return f"the triton backend decodes states in float32 and half precision, got {pool.sums.dtype}"
    if not all(getattr(pool, name)[:1].is_contiguous() for name in _STATE):
        return "the triton backend decodes states whose tensors have every row in one piece"
    return why_not(value)


def extend_one_(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows) -> tuple[Tensor, Tensor]:
    """Output and denominator of one token, already checked; the state moves on. Two launches whatever the positions."""
    tensors: list[Any] = [None if x is None else _one_token(x) for x in inputs[:6]]  # up to the decay
    kept: list[Tensor] = [getattr(state.pool, name) for name in _STATE]
    # An operator's call takes as long as several launches; it is for those who trace.
    extend: Callable[..., tuple[Tensor, Tensor]] = _extend_one
    if torch.compiler.is_compiling():
        extend = linear_attention_extend_operator
    options = (state.power, state.factors, plan.degree, plan.offset, plan.normalize)
    output, denominator = extend(*tensors, *kept, state.device_position, state.rows, *options)
    if state.device_position is not state.position:
        state.position += 1
    return output[:, :, None], denominator[:, :, None]


def _one_token(x: Tensor) -> Tensor:
    """Without the dimension of tokens, and with entries side by side."""
    token = x[:, :, 0]
    return token if x.dim() == 3 or token.stride(2) == 1 else token.contiguous()


def _extend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local_query: Tensor | None,
    local_key: Tensor | None,
    log_decay: Tensor | None,
    sums: Tensor,
    normalizer: Tensor,
    total_log_decay: Tensor,
    open_features: Tensor,
    open_value: Tensor,
    open_key: Tensor,
    open_log_decay: Tensor,
    position: Tensor,
    rows: Tensor | None,
    power: int,
    factors: int,
    degree: int,
    offset: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """Vectors of one token (batch, heads, width) and the tensors of a state -> (batch, heads, value_dim) and (batch,
    heads).
    """
    import triton

    from polysketch.ops.linear.triton.programs.extend import linear_extend, linear_extend_finish

    (batch, heads, features), key_heads, width = query.shape, key.shape[1], value.shape[2]
    chunk, local_width = open_key.shape[2:]
    shared, columns = heads // key_heads, max(16, triton.next_power_of_2(width))
    tuned = configuration("linear_extend", value.device, features=features, width=width, power=power, factors=factors)
    blocks, local_blocks = -(-sums.shape[2] // tuned["ROWS"]), -(-chunk // tuned["TOKENS"])
    parts = (batch * key_heads, blocks + local_blocks, shared)
    numerators = normalizer.new_empty(*parts, width)
    denominators = normalizer.new_empty(parts)
    positions = position.new_empty(batch * key_heads)
    output, mass = value.new_empty(batch, heads, width), normalizer.new_empty(batch, heads)
    common = {"KEY_HEADS": key_heads, "SHARED": shared, "FEATURES": features, "WIDTH": width, "CHUNK": chunk}
    common |= {"LOCAL_WIDTH": local_width, "COLUMNS": columns}
    of_query, of_key, of_value, of_local_query, of_local_key, of_decay = (
        (0, 0) if x is None else x.stride()[:2] for x in (query, key, value, local_query, local_key, log_decay)
    )
    of_rows = [x.stride(0) for x in (open_features, open_value, open_key, open_log_decay)]
    launch(
        linear_extend,
        parts[0] * parts[1],
        *(query, key, value, local_query, local_key, log_decay),
        *(sums, normalizer, open_features, open_value, open_key, open_log_decay, position, rows),
        *(numerators, denominators, positions, sums.stride(0), normalizer.stride(0), *of_rows),
        *(*of_query, *of_key, *of_value, *of_local_query, *of_local_key, *of_decay),
        configuration=tuned,
        **common,
        POWER=power,
        FACTORS=factors,
        DEGREE=degree,
        PRECISION=_precision(value.dtype),
        LOCAL_COLUMNS=max(16, triton.next_power_of_2(local_width)),
    )
    launch(
        linear_extend_finish,
        parts[0],
        *(output, mass, key, value, local_key, log_decay, total_log_decay),
        *(open_features, open_value, open_key, open_log_decay, position, rows),
        *(numerators, denominators, positions, *of_rows, total_log_decay.stride(0)),
        *(*of_key, *of_value, *of_local_key, *of_decay, float(offset), chunk),
        configuration=configuration("linear_extend_finish", value.device, width=width),
        **common,
        BLOCKS=blocks,
        LOCAL_BLOCKS=local_blocks,
        TOKENS=tuned["TOKENS"],
        NORMALIZE=normalize,
    )
    return output, mass


def _precision(dtype: torch.dtype) -> str:
    """Of the products that fold a chunk: kept features are float32, products of two of them too wide for bfloat16."""
    return "tf32" if dtype == torch.bfloat16 else precision(dtype)


linear_attention_extend_operator = Operator(
    "polysketch::linear_attention_extend",
    _extend_one,
    mutates_args=(
        *("sums", "normalizer", "total_log_decay", "open_features", "open_value", "open_key", "open_log_decay"),
        "position",
    ),
)
"""The same as an operator."""


@linear_attention_extend_operator.register_fake
def _(query, key, value, local_query, local_key, log_decay, sums, *arguments):
    return value.new_empty(*query.shape[:2], value.shape[2]), sums.new_empty(query.shape[:2])
