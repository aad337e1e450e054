"""The definition of linear attention: quadratic, plain PyTorch, differentiated by autograd; the oracle of the tests."""

import torch
from torch import Tensor

from polysketch.ops.linear.state import LinearAttentionState, state_dtype
from polysketch.ops.linear.tiles import expand_tiles, pad_features, symmetrize
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    power: int,
    causal: bool,
    offset: float,
    normalize: bool,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: LinearAttentionState | None,
    return_state: bool,
) -> LinearAttentionResult:
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij), by the full matrix of weights.

    w_ij = (phi(q_i) . phi(k_j))^power exp(sum of log_decay over j+1..i), or (q_i . k_j)^degree where i and j share an
    aligned local chunk. Arguments as in `polysketch.ops.linear_attention`, already checked.
    """
    dtype = state_dtype(value.dtype)
    batch, key_heads, length = key_features.shape[:3]
    group = query_features.shape[1] // key_heads

    # 1. Keys: the state's open chunk, then the new tokens. A position below zero is padding before the first token.
    mask = torch.ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask
    mask = mask.to(value.device)
    seen = torch.zeros(batch, dtype=torch.int64) if state is None else state.position
    seen = seen.to(value.device)[:, None]
    position = torch.arange(length, device=value.device) + seen - _padding(mask) * (seen == 0)
    features, values = key_features.to(dtype), value.to(dtype)
    local_key = None if local is None else local.key.to(dtype)
    decay = value.new_zeros(batch, key_heads, length, dtype=dtype) if log_decay is None else log_decay.to(dtype)
    key_position, real = position, mask & (position >= 0)
    if state is not None and local_key is not None:
        slots = torch.arange(state.local_chunk, device=value.device)
        fill = state.fill.to(value.device)[:, None]
        features = torch.cat([state.open_features, features], 2)
        values = torch.cat([state.open_value, values], 2)
        local_key = torch.cat([state.open_key, local_key], 2)
        opened = torch.zeros_like(state.open_log_decay) if log_decay is None else state.open_log_decay
        decay = torch.cat([opened, decay], 2)
        key_position = torch.cat([seen - fill + slots, position], 1)
        real = torch.cat([slots < fill, real], 1)
    decay = decay * real[:, None]

    # 2. Weights. Everything that belongs to keys is repeated for the query heads of its group.
    repeat = lambda x: x.repeat_interleave(group, dim=1)  # noqa: E731
    queries = query_features.to(dtype)
    weights = (queries @ repeat(features).mT) ** power
    total = decay.cumsum(-1)
    if causal:
        since = repeat(total)[..., -length:, None] - repeat(total)[..., None, :]
        weights = weights * since.clamp(max=0).exp()
    allowed = real[:, None, :].expand(-1, queries.shape[2], -1)
    if local is not None:
        exact = (local.query.to(dtype) @ repeat(local_key).mT) ** local.degree
        chunk_of = lambda p: torch.div(p, local.chunk, rounding_mode="floor")  # noqa: E731
        same = chunk_of(position)[:, :, None] == chunk_of(key_position)[:, None, :]
        weights = torch.where(same[:, None], exact, weights)
    if causal:
        allowed = allowed & (key_position[:, None, :] <= position[:, :, None])
    weights = weights.masked_fill(~allowed[:, None], 0.0)

    # 3. Output. The state's sums are decayed from the boundary to each query.
    numerator, denominator = weights @ repeat(values), weights.sum(-1)
    if state is not None:
        state_sums = symmetrize(state.sums, features.shape[-1]) if power == 2 else state.sums
        expanded = _expand(queries, power, query=True) * repeat(total)[..., -length:, None].exp()
        numerator = numerator + expanded @ repeat(state_sums)
        denominator = denominator + (expanded @ repeat(state.normalizer)[..., None])[..., 0]
    output = numerator
    if normalize:
        mass = (offset + denominator)[..., None]
        output = torch.where(mass == 0, 0.0, numerator / mass.masked_fill(mass == 0, 1.0))
    if causal or local is not None:
        output = output.masked_fill((position < 0)[:, None, :, None], 0.0)
    output = output.to(value.dtype)
    if not return_state:
        return LinearAttentionResult(output, None)

    # 4. State: tokens before the last boundary are folded, the later ones kept in their slots.
    chunk = 0 if local is None else local.chunk
    end = position[:, -1:].clamp(min=-1) + 1
    boundary = end - end % chunk if chunk else end
    folded = (real & (key_position < boundary))[:, None]
    folded_total = (decay * folded).sum(-1)
    factor = (folded_total[..., None] - total).clamp(max=0).exp() * folded
    expanded = _expand(features, power, query=False) * factor[..., None]
    sums, normalizer = expanded.mT @ values, expanded.sum(2)
    log_total = folded_total
    if state is not None:
        sums = sums + state_sums * folded_total.exp()[..., None, None]
        normalizer = normalizer + state.normalizer * folded_total.exp()[..., None]
        log_total = log_total + state.log_decay
    slot = key_position[:, None, :] - boundary[..., None] == torch.arange(chunk, device=value.device)[:, None]
    slot = (slot & real[:, None])[:, None].to(dtype)
    return LinearAttentionResult(
        output,
        LinearAttentionState(
            sums=sums,
            normalizer=normalizer,
            log_decay=log_total,
            open_features=slot @ features,
            open_value=slot @ values,
            open_key=slot @ (features[..., :0] if local_key is None else local_key),
            open_log_decay=(slot @ decay[..., None])[..., 0],
            position=end[:, 0].cpu(),
            power=power,
        ),
    )


def _padding(mask: Tensor) -> Tensor:
    """(batch, length) bool -> (batch, 1): tokens before the first real one."""
    return (mask.cumsum(-1) == 0).sum(-1, keepdim=True)


def _expand(x: Tensor, power: int, *, query: bool) -> Tensor:
    return x if power == 1 else expand_tiles(pad_features(x), double_off_diagonal=query)
