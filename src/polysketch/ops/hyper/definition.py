"""What programs compute of a call, by all weights at once: plain PyTorch, to compare them with; quadratic."""

import torch
from torch import Tensor

from polysketch.ops.hyper.types import Given


def attend(given: Given) -> Tensor:
    """(batch, heads, n, value_dim) in the dtype of the inputs; zeros of queries that see no key."""
    shared = given.query.shape[1] // given.key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (given.key, given.value))
    counts = _counts(given).to(given.query.dtype)
    scores = given.query @ key.mT * given.scale + counts.log()
    blind = (counts == 0).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


def _counts(given: Given) -> Tensor:
    """(batch, heads, n, m): how much each key counts for each query, zero where it is not seen."""
    (batch, heads, length, _), keys = given.query.shape, given.key.shape[2]
    asked, near, log_weight = given.met[:3]
    counts = log_weight.new_zeros(batch, given.key.shape[1], heads // given.key.shape[1] * length * keys)
    place = asked.clamp(min=0).long().unsqueeze(-1) * keys + near.unsqueeze(-2)
    each = log_weight.exp().unsqueeze(-2) * (asked >= 0).unsqueeze(-1)
    counts = counts.scatter_add_(-1, place.flatten(2), each.flatten(2)).view(batch, heads, length, keys)
    if given.block:
        token = torch.arange(length, device=counts.device)
        own = (token[:, None] // given.block == token // given.block) & (token[:, None] >= token)
        counts = counts + (own if given.real is None else own & given.real[:, None, None])
    return counts
