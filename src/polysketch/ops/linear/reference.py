"""The definition of linear attention: quadratic, plain PyTorch, differentiated by autograd; the oracle of the tests."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.packing import expand, halves, symmetrize
from polysketch.ops.linear.resolution import resolve
from polysketch.ops.linear.state import LinearAttentionState, state_dtype
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, Plan
from polysketch.ops.mass import quotient


def linear_attention(
    inputs: Inputs, plan: Plan, key_mask: Tensor | None, state: LinearAttentionState | None
) -> LinearAttentionResult:
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij), by the full matrix of weights.

    w_ij = (phi(q_i) . phi(k_j))^power exp(sum of log_decay over j+1..i), with two factors the product of that of both
    halves of phi, or (q_i . k_j)^degree where i and j share an aligned local chunk. Arguments as in
    `polysketch.ops.linear_attention`, already checked.
    """
    if state is not None and plan.power == 2:
        mass = symmetrize(state.normalizer[..., None], state.feature_dim)[..., 0]
        state = replace(state, sums=symmetrize(state.sums, state.feature_dim), normalizer=mass)
    keys, position = _keys(inputs, key_mask, state)
    length, group = inputs.query.shape[2], inputs.query.shape[1] // inputs.key.shape[1]

    def of_group(x: Tensor) -> Tensor:
        """What belongs to a key head, for each query head of its group."""
        return x.repeat_interleave(group, dim=1)

    # 1. Weights.
    query = inputs.query.to(keys.value.dtype)
    operands = zip(halves(query, plan.factors), halves(of_group(keys.features), plan.factors), strict=True)
    first, *second = (a @ b.mT for a, b in operands)
    weights = (first * second[0] if second else first) ** plan.power
    if plan.causal:
        since = of_group(keys.total_decay)[..., -length:, None] - of_group(keys.total_decay)[..., None, :]
        weights = weights * since.clamp(max=0).exp()
    if inputs.local_query is not None and keys.local is not None:
        exact = (inputs.local_query.to(query.dtype) @ of_group(keys.local).mT) ** plan.degree
        same = (position // plan.chunk)[:, None, :, None] == (keys.position // plan.chunk)[:, None, None, :]
        weights = torch.where(same, exact, weights)
    allowed = keys.real[:, None, :]
    if plan.causal:
        block = plan.diagonal  # of one token where attention is simply causal
        allowed = allowed & (keys.position[:, None, :] // block <= position[:, :, None] // block)
    weights = weights.masked_fill(~allowed[:, None], 0.0)

    # 2. Numerator and denominator. A state's sums are decayed from its boundary to each query.
    numerator, denominator = weights @ of_group(keys.value), weights.sum(-1)
    if state is not None:
        expanded = expand(query, plan.power, plan.factors, query=True)
        expanded = expanded * of_group(keys.total_decay)[..., -length:, None].exp()
        numerator = numerator + expanded @ of_group(state.sums)
        denominator = denominator + (expanded @ of_group(state.normalizer)[..., None])[..., 0]

    # 3. Output. Rows without any mass and padding give zeros.
    denominator = plan.offset + denominator
    if state is not None and plan.normalize and plan.power == 2:  # exact weights have nothing to resolve, sums have
        decay = of_group(keys.total_decay)[..., -length:].exp()
        held = of_group(state.sums), of_group(state.normalizer)
        numerator, denominator = resolve(query, *held, decay, numerator, denominator)
    output = numerator
    if plan.normalize:
        output = quotient(numerator, denominator)
    if plan.causal or keys.local is not None:
        padding = (position < 0)[:, None]
        output, denominator = output.masked_fill(padding[..., None], 0.0), denominator.masked_fill(padding, 0.0)
    after = _state_after(keys, position, plan, state) if plan.return_sums else None
    return LinearAttentionResult(output.to(inputs.value.dtype), after, denominator)


class _Keys(NamedTuple):
    """Everything that belongs to keys, in the dtype of sums: those of the state's open chunk, then the new ones.

    Attributes:
        features, value: (batch, key_heads, keys, width).
        local: keys of the local part, or None.
        log_decay: (batch, key_heads, keys); 0 where there is none and at masked tokens.
        total_decay: the same, added up from the first key to each.
        position: (batch, keys), from the row's first real token on; below zero before it.
        real: (batch, keys) bool, whether there is a token that weighs.
    """

    features: Tensor
    value: Tensor
    local: Tensor | None
    log_decay: Tensor
    total_decay: Tensor
    position: Tensor
    real: Tensor


def _keys(inputs: Inputs, key_mask: Tensor | None, state: LinearAttentionState | None) -> tuple[_Keys, Tensor]:
    """The keys of a call, and the positions (batch, length) of the new ones among them."""
    key, value, local = inputs.key, inputs.value, inputs.local_key
    (batch, key_heads, length), device, dtype = key.shape[:3], value.device, state_dtype(value.dtype)
    mask = torch.ones(batch, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    seen = torch.zeros(batch, 1, dtype=torch.int64, device=device) if state is None else state.position[:, None]
    seen = seen.to(device)
    padding = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
    position = torch.arange(length, device=device) + seen - padding * (seen == 0)
    log_decay = inputs.log_decay
    decay = value.new_zeros(batch, key_heads, length, dtype=dtype) if log_decay is None else log_decay.to(dtype)
    local = None if local is None else local.to(dtype)
    features, values, key_position, real = key.to(dtype), value.to(dtype), position, mask & (position >= 0)
    if state is not None and local is not None:
        slots = torch.arange(state.local_chunk, device=device)
        fill = state.fill.to(device)[:, None]
        opened = torch.zeros_like(state.open_log_decay) if log_decay is None else state.open_log_decay
        features = torch.cat([state.open_features, features], 2)
        values = torch.cat([state.open_value, values], 2)
        local = torch.cat([state.open_key, local], 2)
        decay = torch.cat([opened, decay], 2)
        key_position = torch.cat([seen - fill + slots, position], 1)
        real = torch.cat([slots < fill, real], 1)
    decay = decay * real[:, None]
    return _Keys(features, values, local, decay, decay.cumsum(-1), key_position, real), position


def _state_after(
    keys: _Keys, position: Tensor, plan: Plan, before: LinearAttentionState | None
) -> LinearAttentionState:
    """Tokens before the last boundary of a local chunk are folded, the later ones kept in their slots."""
    chunk = 0 if keys.local is None else plan.chunk
    end = position[:, -1:].clamp(min=-1) + 1
    boundary = end - end % chunk if chunk else end
    folded = (keys.real & (keys.position < boundary))[:, None]
    total = (keys.log_decay * folded).sum(-1)
    factor = (total[..., None] - keys.total_decay).clamp(max=0).exp() * folded
    expanded = expand(keys.features, plan.power, plan.factors, query=False) * factor[..., None]
    sums, normalizer, log_decay = expanded.mT @ keys.value, expanded.sum(2), total
    if before is not None:
        sums = sums + before.sums * total.exp()[..., None, None]
        normalizer = normalizer + before.normalizer * total.exp()[..., None]
        log_decay = total + before.log_decay
    slots = torch.arange(chunk, device=position.device)
    slot = (keys.position[:, None, :] - boundary[..., None] == slots[:, None]) & keys.real[:, None]
    slot = slot[:, None].to(keys.value.dtype)
    return LinearAttentionState(
        sums=sums,
        normalizer=normalizer,
        log_decay=log_decay,
        open_features=slot @ keys.features,
        open_value=slot @ keys.value,
        open_key=slot @ (keys.features[..., :0] if keys.local is None else keys.local),
        open_log_decay=(slot @ keys.log_decay[..., None])[..., 0],
        position=end[:, 0].cpu(),
        power=plan.power,
        factors=plan.factors,
    )
