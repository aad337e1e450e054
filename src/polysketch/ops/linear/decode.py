"""Decoding: a few new tokens against a state that is updated in place, without gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import refuse_tangents
from polysketch.ops.linear import native
from polysketch.ops.linear.api import linear_attention
from polysketch.ops.linear.checks import checked
from polysketch.ops.linear.packing import expand
from polysketch.ops.linear.resolution import resolve
from polysketch.ops.linear.self_check import steps_agree, why_no_steps
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.triton import decoding as triton_decode
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, LocalPolynomial, Plan
from polysketch.ops.mass import quotient
from polysketch.ops.triton.availability import AUTO_DEVICES

Step = Callable[[Inputs, Plan, Any], tuple[Tensor, Tensor]]
"""One token of every row: output (batch, heads, 1, value_dim) and denominator (batch, heads, 1); the state moves on.

All but plain PyTorch's take `StateRows` too.
"""


# Longer spans go through the chunked backend: one call for all of them costs less than this many single steps.
STEPS_AT_MOST = 4


@torch.no_grad()
def linear_attention_extend_(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    state: LinearAttentionState | StateRows,
    *,
    power: int = 1,
    factors: int = 1,
    block_size: int | None = None,
    offset: float = 0.0,
    normalize: bool = True,
    local: LocalPolynomial | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> LinearAttentionResult:
    """Causal `linear_attention` of the next tokens; `state` moves on in place, at the same addresses.

    Arguments and errors as in `linear_attention`; any number of tokens, rows at different positions too. Nothing is
    differentiated: to train through a state, pass it to `linear_attention`. Forward-mode derivatives are refused.
    Of `StateRows` each row moves on where it lies.

    Rounding: without a local part every token is added to the sums in the state's dtype, so they are wrong by at most
    n u of the sum of the sizes of n terms, u = 2^-24 in float32: 6 % after a million tokens at worst, and about
    sqrt(n) u where roundings are random. After 2^24 tokens of one size further ones change nothing. With a local part
    the n are chunks, not tokens. Whoever decodes more tokens than that gives a state of float64
    (`LinearAttentionState.init(dtype=torch.float64)`), of twice the size, whose sums are kept in float64 by calls of at
    most `STEPS_AT_MOST` tokens. A second float32 beside each sum would make every state as large, and every token wait
    for as much memory, where few need it. Sums in half precision are rounded once a call, or once a token by a program:
    u = 2^-11 in float16 and 2^-8 in bfloat16.

    Returns:
        As `linear_attention`; `.state` is the one that was given, None for `StateRows`.

    Cost of one token, per key head: reading `state.sums` once, and the tokens of the open chunk. When a chunk is full
    it is folded into the sums, at the cost of about one forward pass over that chunk. `StateRows` are copied before
    and after where more than one token comes, or where neither the native program nor Triton's takes it.
    """
    operands = query_features, key_features, value
    length = key_features.shape[2] if key_features.ndim == 4 else 0  # `checked` refuses the others
    if length > STEPS_AT_MOST or key_mask is not None or block_size is not None:
        options: dict[str, Any] = {"power": power, "factors": factors, "offset": offset, "normalize": normalize}
        options |= {"block_size": block_size, "local": local, "log_decay": log_decay, "key_mask": key_mask}
        if isinstance(state, StateRows):
            return state.on_a_copy(lambda own: linear_attention_extend_(*operands, own, **options))
        result = linear_attention(*operands, causal=True, state=state, return_state=True, **options)
        assert result.state is not None
        return result._replace(state=state.copy_(result.state))
    inputs, plan = checked(
        *operands,
        power=power,
        factors=factors,
        causal=True,
        block_size=None,
        offset=offset,
        normalize=normalize,
        local=local,
        log_decay=log_decay,
        key_mask=None,
        state=state,
        return_state=True,
        compute_chunk=None,
    )
    refuse_tangents("linear_attention_extend_", *inputs)
    with without_autocast(value.device.type):
        if _step_for(inputs, plan, state) is _extend_one:
            output, denominator = _extend_on_copies(inputs, plan, state)
        else:
            output, denominator = _extend(inputs, plan, state)
    return LinearAttentionResult(output, None if isinstance(state, StateRows) else state, denominator)


def _extend_on_copies(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows) -> tuple[Tensor, Tensor]:
    """`_extend` in plain PyTorch, which takes neither rows of another state nor sums in half precision."""
    if isinstance(state, StateRows):
        return state.on_a_copy(lambda own: _extend_on_copies(inputs, plan, own))
    return state.on_wide_sums(lambda own: _extend(inputs, plan, own))


def _extend(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows) -> tuple[Tensor, Tensor]:
    """Output and denominator of a few tokens, one after another."""
    step, length = _step_for(inputs, plan, state), inputs.key.shape[2]
    if length == 1:
        return step(inputs, plan, state)
    steps = (step(_token(inputs, index), plan, state) for index in range(length))
    output, denominator = (torch.cat(parts, 2) for parts in zip(*steps, strict=True))
    return output, denominator


def _token(inputs: Inputs, index: int) -> Inputs:
    """The inputs of one token."""
    return Inputs(**{name: tensor[:, :, index : index + 1] for name, tensor in inputs.differentiable().items()})


def _step_for(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows) -> Step:
    """The fastest step that these tensors allow."""
    if _by_triton(inputs.value, state) and steps_agree(inputs, plan, state):
        return triton_decode.extend_one_
    return native.extend_one_ if native.can_extend(inputs.query, state) else _extend_one


def _by_triton(value: Tensor, state: LinearAttentionState | StateRows) -> bool:
    """Whether Triton's programs take the step; under its interpreter they run only when called directly."""
    on_a_device = value.device.type in AUTO_DEVICES or value.is_meta
    return on_a_device and triton_decode.why_not_extend(value, state) is None


def why_not_captured(state: LinearAttentionState) -> str | None:
    """Why a graph of the device that captured one token's step would not serve every token; None where it would.

    Without a local part nothing depends on the position. With one, Triton's programs decide on the device; the other
    steps decide about chunks in host memory.
    """
    if state.local_chunk == 0:
        return None
    if _by_triton(state.sums, state):
        return why_no_steps(state.sums.device)
    return triton_decode.why_not_extend(state.sums, state) or "Triton's interpreter decodes on no device"


def _extend_one(inputs: Inputs, plan: Plan, state: LinearAttentionState) -> tuple[Tensor, Tensor]:
    """A step in plain PyTorch."""
    dtype, (batch, key_heads) = state.sums.dtype, inputs.key.shape[:2]
    lead = (batch, key_heads, inputs.query.shape[1] // key_heads)
    rows = inputs.query.reshape(*lead, inputs.query.shape[3]).to(dtype)
    key, value = inputs.key.to(dtype), inputs.value.to(dtype)
    decay = None if inputs.log_decay is None else inputs.log_decay.to(dtype)
    factor, fill = None, []
    if inputs.local_query is None or inputs.local_key is None:
        _fold_token(state, key, value, decay)
        numerator, denominator = _read(state, rows)
    else:
        fill = state.fill.tolist()
        local_query = inputs.local_query.reshape(*lead, inputs.local_query.shape[3]).to(dtype)
        _open_token(state, fill, key, value, inputs.local_key.to(dtype), decay)
        numerator, denominator = _read(state, rows)
        if decay is not None:
            factor = state.open_log_decay.sum(-1).exp()[..., None]
            numerator, denominator = numerator * factor[..., None], denominator * factor
        used = max(fill, default=0) + 1
        exact = (local_query @ state.open_key[:, :, :used].mT).pow_(plan.degree)
        numerator = numerator + exact @ state.open_value[:, :, :used]
        denominator = denominator + exact.sum(-1)
    denominator = denominator + plan.offset
    if plan.normalize and state.power == 2:
        numerator, denominator = resolve(rows, state.sums, state.normalizer, factor, numerator, denominator)
    _fold_full_chunks(state, [row for row, tokens in enumerate(fill) if tokens + 1 == plan.chunk])
    state.advance_()
    if plan.normalize:
        numerator = quotient(numerator, denominator)
    heads = inputs.query.shape[1]
    output = numerator.reshape(batch, heads, 1, value.shape[3]).to(inputs.value.dtype)
    return output, denominator.reshape(batch, heads, 1)


def _expand(x: Tensor, state: LinearAttentionState, *, query: bool) -> Tensor:
    return expand(x, state.power, state.factors, query=query)


def _read(state: LinearAttentionState, rows: Tensor) -> tuple[Tensor, Tensor]:
    expanded = _expand(rows, state, query=True)
    return expanded @ state.sums, (expanded @ state.normalizer[..., None])[..., 0]


def _fold_token(state: LinearAttentionState, key: Tensor, value: Tensor, decay: Tensor | None) -> None:
    expanded = _expand(key, state, query=False)
    if decay is not None:
        factor = decay.exp()
        state.sums.mul_(factor[..., None])
        state.normalizer.mul_(factor)
        state.log_decay.add_(decay[..., 0])
    state.sums.addcmul_(expanded.mT, value)
    state.normalizer.add_(expanded[:, :, 0])


def _open_token(
    state: LinearAttentionState, fill: list[int], key: Tensor, value: Tensor, local_key: Tensor, decay: Tensor | None
) -> None:
    """Write the token into the next slot of every row's open chunk."""
    rows = [slice(None)] if len(set(fill)) == 1 else [slice(row, row + 1) for row in range(len(fill))]
    for place in rows:
        slot = fill[place.start or 0]
        state.open_features[place, :, slot] = key[place, :, 0]
        state.open_value[place, :, slot] = value[place, :, 0]
        state.open_key[place, :, slot] = local_key[place, :, 0]
        if decay is not None:
            state.open_log_decay[place, :, slot] = decay[place, :, 0]


def _fold_full_chunks(state: LinearAttentionState, full: list[int]) -> None:
    """Fold the open chunks of these rows of the batch into their sums and empty them."""
    if not full:
        return
    whole = slice(None) if len(full) == state.sums.shape[0] else None
    for row in [whole] if whole is not None else [slice(row, row + 1) for row in full]:
        since = state.open_log_decay[row].cumsum(-1)
        total = since[..., -1]
        value = state.open_value[row] * (total[..., None] - since).exp()[..., None]
        expanded = _expand(state.open_features[row], state, query=False)
        state.sums[row] = state.sums[row] * total.exp()[..., None, None] + expanded.mT @ value
        ones = (total[..., None] - since).exp()
        carried = state.normalizer[row] * total.exp()[..., None]
        state.normalizer[row] = carried + (ones[..., None, :] @ expanded)[..., 0, :]
        state.log_decay[row] += total
        for tensor in (state.open_features, state.open_value, state.open_key, state.open_log_decay):
            tensor[row] = 0
