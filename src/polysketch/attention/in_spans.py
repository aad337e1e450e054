"""Long sequences without gradients, span by span: memory holds the features of one span, and a cache nearly does.

A feature map writes and reads its features several times, and they are often wider than a head. Those of a whole
sequence go through main memory each time. In powers above 1 features are few, and the whole at once is the faster way.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysketch.ops.custom_op import nothing_looks_on

if TYPE_CHECKING:
    from polysketch.attention.linearized import LinearizedAttention

_NUMBERS = 2**21  # features of a span for each thread, for two at least: 8 MB in float32
_FEWEST_TOKENS = 1024  # of a span: below, what a call costs besides shows
_FEWEST_FEATURES = 2**24  # of the whole sequence: 64 MB; fewer are as fast at once


def length_of_a_span(
    mechanism: LinearizedAttention, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
) -> int | None:
    """Tokens to compute at a time, causally; None where all of them are computed at once.

    Args:
        mechanism: what is to attend.
        query, key, value, hidden: all that it is given.
    """
    batch, heads, length, _ = query.shape
    if mechanism.feature_map.power != 1 or mechanism.local_chunk or length < 2 * _FEWEST_TOKENS or batch == 0:
        return None
    if query.device.type != "cpu":
        return None
    given = [query, key, value, *([] if hidden is None else [hidden])]
    if not nothing_looks_on(*chain(given, mechanism.parameters(), mechanism.buffers())):
        return None
    rows = batch * (heads + key.shape[1]) * mechanism.feature_map.feature_dim
    if rows * length < _FEWEST_FEATURES:
        return None
    numbers = max(2, torch.get_num_threads()) * _NUMBERS
    span = max(_FEWEST_TOKENS, numbers // rows // _FEWEST_TOKENS * _FEWEST_TOKENS)
    return span if length >= 2 * span else None


def attended(
    mechanism: LinearizedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: int,
    *,
    key_mask: Tensor | None,
    hidden: Tensor | None,
) -> Tensor:
    """Causal attention as by `mechanism.forward`, up to rounding.

    Args:
        mechanism: with a state of constant size.
        query, key, value, key_mask, hidden: as for its `forward`.
        span: tokens at a time.
    """
    state = mechanism.init_state(query.shape[0], query.device, value.dtype, value_dim=value.shape[3])
    output = value.new_empty(*query.shape[:3], value.shape[3])
    for begin in range(0, query.shape[2], span):
        tokens = slice(begin, begin + span)
        output[:, :, tokens], state = mechanism.extend(
            query[:, :, tokens],
            key[:, :, tokens],
            value[:, :, tokens],
            state,
            key_mask=None if key_mask is None else key_mask[:, tokens],
            hidden=None if hidden is None else hidden[:, tokens],
        )
    return output
