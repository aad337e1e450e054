"""HyperAttention by programs: who meets whom is found by PyTorch's operations, and attended to in one call."""

import torch
from torch import Tensor

from polysketch.ops.hyper.approximate import Options, meetings_by_halves, meetings_of_nodes
from polysketch.ops.hyper.meetings import Meetings, Places
from polysketch.ops.hyper.operator import hyper_attention_operator


def attend_by_programs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    causal: bool,
    min_length: int,
    options: Options,
    backend: str,
) -> Tensor:
    """(batch, heads, n, value_dim), float32 where inputs are half precision.

    Args:
        query, key, value: as of the op, aligned.
        real: (batch, m) bool, False for keys that nobody sees; None when all are seen.
        causal, min_length: as of the op.
        options: of the op, its mask of large entries with nodes where the call is not causal.
        backend: "native" or "triton".
    """
    met = who_meets_whom(query, key, real, causal, min_length, options)
    of_blocks, block = (real, min_length) if causal else (None, 0)
    return hyper_attention_operator(query, key, value, of_blocks, *met, block, options.scale, backend)[0]


@torch.no_grad()
def who_meets_whom(
    query: Tensor, key: Tensor, real: Tensor | None, causal: bool, min_length: int, options: Options
) -> Meetings:
    """What queries see, beyond their own blocks where the call is causal; arguments as of `attend_by_programs`."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    everyone = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if real is None else real
    if causal:
        return meetings_by_halves(grouped, key, everyone, min_length, options)
    # All keys are one node.
    start = torch.zeros(1, dtype=torch.int64, device=key.device)
    places = Places(start, start, query.shape[2])
    by_rank = query.shape[2] == key.shape[2]
    return meetings_of_nodes(grouped.unsqueeze(2), key.unsqueeze(2), everyone.unsqueeze(1), places, by_rank, options)
