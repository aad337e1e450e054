"""The formulas as one would write them in PyTorch, every intermediate in the dtype of the inputs.

In float64 they are the truth; in a working dtype on the same device they are what a program may be compared with: it
rounds where they round. Differentiated by autograd.
"""

import torch
from torch import Tensor


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    power: int,
    factors: int,
    causal: bool,
    offset: float,
    normalize: bool,
    degree: int,
    local: int = 0,
    local_query: Tensor | None = None,
    local_key: Tensor | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """`polysketch.ops.linear_attention` without a state, by all weights at once; shapes as there."""
    group, length = query.shape[1] // key.shape[1], key.shape[2]
    wide = lambda tensor: tensor.repeat_interleave(group, 1)  # noqa: E731
    mask = torch.ones(len(key), length, dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    position = torch.arange(length, device=key.device) - (mask.cumsum(1) == 0).sum(1, keepdim=True)
    weights = torch.ones((), dtype=query.dtype, device=query.device)
    for of_query, of_key in zip(query.chunk(factors, -1), wide(key).chunk(factors, -1), strict=True):
        weights = weights * (of_query @ of_key.mT) ** power
    if log_decay is not None:
        total = wide(log_decay.masked_fill(~mask[:, None], 0.0).cumsum(-1))
        weights = weights * (total[..., :, None] - total[..., None, :]).clamp(max=0.0).exp()
    if local and local_query is not None and local_key is not None:
        chunk = torch.div(position, local, rounding_mode="floor")
        same = (chunk[:, :, None] == chunk[:, None, :])[:, None]
        weights = torch.where(same, (local_query @ wide(local_key).mT) ** degree, weights)
    allowed = mask[:, None, None]
    if causal or local:  # what stands before a row's first token gives zeros
        allowed = allowed & (position >= 0)[:, None, :, None]
    if causal:
        allowed = allowed & (position[:, :, None] >= position[:, None, :])[:, None]
    weights = weights.masked_fill(~allowed, 0.0)
    return _weighed(weights, wide(value), offset, normalize)


def polynomial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, degree: int, offset: float, causal: bool
) -> Tensor:
    """`polysketch.ops.polynomial_attention` without a mask."""
    group = query.shape[1] // key.shape[1]
    weights = (query @ key.repeat_interleave(group, 1).mT) ** degree
    return _weighed(weights.tril() if causal else weights, value.repeat_interleave(group, 1), offset, True)


def delta_writes(key: Tensor, value: Tensor, strength: Tensor, *, factors: int) -> Tensor:
    """`polysketch.ops.delta_writes` without a state, token by token."""
    first, *second = key.chunk(factors, -1)
    phi = (first[..., :, None] * second[0][..., None, :]).flatten(-2) if second else first
    sums = value.new_zeros(*phi.shape[:2], phi.shape[3], value.shape[3])
    written = []
    for token in range(phi.shape[2]):
        features = phi[:, :, token, :, None]
        answer = (features * sums).sum(2)
        written.append(strength[:, :, token, None] * (value[:, :, token] - answer))
        sums = sums + features * written[-1][:, :, None]
    return torch.stack(written, 2)


def _weighed(weights: Tensor, value: Tensor, offset: float, normalize: bool) -> Tensor:
    if not normalize:
        return weights @ value
    mass = offset + weights.sum(-1, keepdim=True)
    return torch.where(mass == 0, 0.0, weights @ value / mass.masked_fill(mass == 0, 1.0))


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """`polysketch.ops.softmax_attention`; queries are the last positions, and rows without a key give zeros."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[3] ** 0.5
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    allowed = (allowed.tril(key.shape[2] - query.shape[2]) if causal else allowed)[None, None]
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    weights = scores.masked_fill(~allowed, -1e30).softmax(-1).masked_fill(~allowed, 0.0)
    return weights @ value
