"""A call of `linear_attention` by a backend, step by step: mask, align, run in spans, give back."""

from functools import partial

import torch
from torch import Tensor

from polysketch.ops.linear.aligned_op import run
from polysketch.ops.linear.alignment import Alignment, align, open_rows
from polysketch.ops.linear.backends import Backend
from polysketch.ops.linear.blocks import run_both_directions, run_in_blocks, with_chunk
from polysketch.ops.linear.state import LinearAttentionState, state_dtype
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, Outputs, Plan


def attend(
    backend: Backend, inputs: Inputs, plan: Plan, key_mask: Tensor | None, state: LinearAttentionState | None
) -> LinearAttentionResult:
    """The whole call, already checked; a chunk that is 0 is the backend's own."""
    if key_mask is not None:
        inputs = _without_masked_keys(key_mask, inputs)
    if backend.whole is not None:
        return backend.whole(inputs, plan, key_mask, state)
    plan = with_chunk(inputs, plan, backend)
    if not plan.causal and inputs.local_key is None:  # nothing depends on positions
        found = run(inputs, plan, backend)
        return LinearAttentionResult(found.output, None, found.denominator)
    alignment = align(key_mask, state, inputs.key)
    aligned = inputs if alignment is None else _to_aligned(alignment, inputs, state)
    if state is not None:
        aligned = aligned._replace(sums=state.sums, normalizer=state.normalizer)
    found = (run_in_blocks if plan.causal else run_both_directions)(aligned, plan, backend)
    after = _next_state(found, aligned, plan, alignment, state) if plan.return_sums else None
    if alignment is None:
        return LinearAttentionResult(found.output, after, found.denominator)
    denominator = alignment.from_aligned(found.denominator[..., None])[..., 0]
    return LinearAttentionResult(alignment.from_aligned(found.output), after, denominator)


def _without_masked_keys(key_mask: Tensor, inputs: Inputs) -> Inputs:
    """A key of zeros has weight zero, sketched and exact: masked tokens need no other care, whatever stood there."""
    real = key_mask[:, None, :, None]
    local_key, log_decay = inputs.local_key, inputs.log_decay
    return inputs._replace(
        key=torch.where(real, inputs.key, 0.0),
        value=torch.where(real, inputs.value, 0.0),
        local_key=None if local_key is None else torch.where(real, local_key, 0.0),
        log_decay=None if log_decay is None else torch.where(real[..., 0], log_decay, 0.0),
    )


def _to_aligned(alignment: Alignment, inputs: Inputs, state: LinearAttentionState | None) -> Inputs:
    """The inputs in aligned rows, the tokens of the state's open chunk in front."""
    move, opened = alignment.to_aligned, state if alignment.slots else None
    local_query, local_key, log_decay = inputs.local_query, inputs.local_key, inputs.log_decay
    if log_decay is not None:
        log_decay = move(log_decay[..., None], None if opened is None else opened.open_log_decay[..., None])[..., 0]
    return inputs._replace(
        query=move(inputs.query),
        key=move(inputs.key, None if opened is None else opened.open_features),
        value=move(inputs.value, None if opened is None else opened.open_value),
        local_query=None if local_query is None else move(local_query),
        local_key=None if local_key is None else move(local_key, None if opened is None else opened.open_key),
        log_decay=log_decay,
        length=alignment.total(),
    )


def _next_state(
    found: Outputs, aligned: Inputs, plan: Plan, alignment: Alignment | None, before: LinearAttentionState | None
) -> LinearAttentionState:
    """The state after the last token: what was folded, and the open chunk cut out of the aligned rows."""
    key, value, local_key = aligned.key, aligned.value, aligned.local_key
    dtype = state_dtype(value.dtype)
    batch, key_heads, length = key.shape[:3]
    total = torch.full((batch,), length, device=key.device) if alignment is None else alignment.total()
    chunk = 0 if local_key is None else plan.chunk
    if aligned.log_decay is None:  # nothing of the length of the tokens is made then
        decay = key.new_zeros((), dtype=dtype).expand(batch, key_heads, length)
        log_total = decay.new_zeros(batch, key_heads)
    else:
        decay = aligned.log_decay.to(dtype)
        folded = torch.arange(length, device=key.device) < (total - total % chunk if chunk else total)[:, None]
        log_total = (decay * folded[:, None]).sum(-1)
    cut = partial(open_rows, total=total, chunk=chunk)
    seen = (
        torch.full((batch,), length, device="cpu") if alignment is None else (alignment.length - alignment.start).cpu()
    )
    return LinearAttentionState(
        sums=found.sums,
        normalizer=found.normalizer,
        log_decay=log_total if before is None else log_total + before.log_decay,
        open_features=cut(key).to(dtype),
        open_value=cut(value).to(dtype),
        open_key=cut(key[..., :0] if local_key is None else local_key).to(dtype),
        open_log_decay=cut(decay[..., None])[..., 0],
        position=seen if before is None else before.position + seen,
        power=plan.power,
        factors=plan.factors,
    )
