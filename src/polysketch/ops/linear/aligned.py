"""From a public call to aligned operator calls and back: masks, padding, states, both directions."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.alignment import Alignment, align, open_rows
from polysketch.ops.linear.operators import linear_attention_operator
from polysketch.ops.linear.plan import Diagonal
from polysketch.ops.linear.spans import attend_in_spans, num_spans
from polysketch.ops.linear.state import LinearAttentionState, state_dtype
from polysketch.ops.linear.tiles import expanded_size
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial


class ComputeChunk(NamedTuple):
    """Tokens worked on at once where there is no local part.

    Attributes:
        size: of a chunk.
        single: up to so many tokens one chunk holds everything: the quadratic formula, in short rows.
    """

    size: int
    single: int


COMPUTE_CHUNKS = {
    "chunked": ComputeChunk(256, 1024),
    "native": ComputeChunk(128, 512),
    "triton": ComputeChunk(256, 256),
}


ROWS_OF_A_PROGRAM = 128
"""About so many rows of the sums are one program of the triton backend."""


def aligned_attention(
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
    chunk_size: int | None,
    backend: str,
) -> LinearAttentionResult:
    """A backend of `operators.PROGRAMS`; arguments as in `polysketch.ops.linear_attention`, already checked."""
    if key_mask is not None:
        key_features, value, local, log_decay = _mask_keys(key_mask, key_features, value, local, log_decay)
    call = partial(_call, power=power, offset=offset, normalize=normalize, backend=backend)
    chunk = local.chunk if local is not None else chunk_size or _compute_chunk(query_features.shape[2], backend)
    if not causal and local is None:
        result = call(query_features, key_features, value, causal=False, chunk=chunk)
        return LinearAttentionResult(result[0], None)
    alignment = align(key_mask, state, key_features)
    moved = _to_aligned(alignment, query_features, key_features, value, local, log_decay, state)
    if not causal:
        output = _both_directions(*moved[:4], power=power, offset=offset, normalize=normalize, backend=backend)
        return LinearAttentionResult(output if alignment is None else alignment.from_aligned(output), None)
    count = num_spans(moved[1], chunk, _pieces(backend, moved[1], power))
    causal_call = partial(call, causal=True) if count == 1 else partial(attend_in_spans, call, count)
    output, _, sums, normalizer = causal_call(
        *moved,
        chunk=chunk,
        sums=None if state is None else state.sums,
        normalizer=None if state is None else state.normalizer,
        length=None if alignment is None else alignment.total,
        return_sums=return_state,
    )
    if alignment is not None:
        output = alignment.from_aligned(output)
    if not return_state:
        return LinearAttentionResult(output, None)
    new = _next_state(sums, normalizer, moved, alignment, state, power)
    return LinearAttentionResult(output, new)


def _compute_chunk(length: int, backend: str) -> int:
    chunk = COMPUTE_CHUNKS[backend]
    return length if length <= chunk.single else chunk.size


def _pieces(backend: str, key: Tensor, power: int) -> int:
    """Into how many programs a backend cuts the sums of one head."""
    return -(-expanded_size(key.shape[3], power) // ROWS_OF_A_PROGRAM) if backend == "triton" else 1


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: LocalPolynomial | None = None,
    log_decay: Tensor | None = None,
    *,
    power: int,
    causal: bool,
    offset: float,
    normalize: bool,
    chunk: int,
    diagonal: Diagonal = Diagonal.CAUSAL,
    sums: Tensor | None = None,
    normalizer: Tensor | None = None,
    length: Tensor | None = None,
    return_sums: bool = False,
    backend: str,
):
    local_query, local_key, degree = (None, None, 2) if local is None else (local.query, local.key, local.degree)
    return linear_attention_operator(
        query,
        key,
        value,
        local_query,
        local_key,
        log_decay,
        sums,
        normalizer,
        length,
        power,
        causal,
        offset,
        normalize,
        degree,
        chunk,
        int(diagonal),
        return_sums,
        backend,
    )


def _mask_keys(key_mask: Tensor, key: Tensor, value: Tensor, local: LocalPolynomial | None, log_decay: Tensor | None):
    """A key of zeros has weight zero, sketched and exact: masked tokens need no other care."""
    real = key_mask[:, None, :, None]
    key, value = torch.where(real, key, 0.0), torch.where(real, value, 0.0)
    if local is not None:
        local = local._replace(key=torch.where(real, local.key, 0.0))
    if log_decay is not None:
        log_decay = torch.where(real[..., 0], log_decay, 0.0)
    return key, value, local, log_decay


def _to_aligned(
    alignment: Alignment | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
    state: LinearAttentionState | None,
):
    """query, key, value, local, log_decay in aligned rows, the state's open chunk in front."""
    if alignment is None:
        return query, key, value, local, log_decay
    move, opened = alignment.to_aligned, _open_chunk(state if alignment.slots else None)
    if local is not None:
        local = local._replace(query=move(local.query), key=move(local.key, opened["key"]))
    if log_decay is not None:
        log_decay = move(log_decay[..., None], opened["log_decay"])[..., 0]
    return move(query), move(key, opened["features"]), move(value, opened["value"]), local, log_decay


def _open_chunk(state: LinearAttentionState | None) -> dict[str, Tensor | None]:
    """The tokens of a state's open chunk, (batch, key_heads, chunk, width) each; None without a state."""
    if state is None:
        return {"features": None, "value": None, "key": None, "log_decay": None}
    return {
        "features": state.open_features,
        "value": state.open_value,
        "key": state.open_key,
        "log_decay": state.open_log_decay[..., None],
    }


def _next_state(
    sums: Tensor, normalizer: Tensor, moved, alignment: Alignment | None, state: LinearAttentionState | None, power: int
) -> LinearAttentionState:
    """The state after the last token: what was folded, and the open chunk cut out of the aligned rows."""
    _, key, value, local, log_decay = moved
    dtype = state_dtype(value.dtype)
    batch, key_heads, length = key.shape[:3]
    total = torch.full((batch,), length, device=key.device) if alignment is None else alignment.total
    chunk = 0 if local is None else local.chunk
    decay = key.new_zeros(batch, key_heads, length, dtype=dtype) if log_decay is None else log_decay.to(dtype)
    steps = torch.arange(length, device=key.device)
    folded = steps < (total - total % chunk if chunk else total)[:, None]
    log_total = (decay * folded[:, None]).sum(-1)
    cut = partial(open_rows, total=total, chunk=chunk)
    seen = torch.full((batch,), key.shape[2]) if alignment is None else (alignment.length - alignment.start).cpu()
    before = None if state is None else state.position
    return LinearAttentionState(
        sums=sums,
        normalizer=normalizer,
        log_decay=log_total if state is None else log_total + state.log_decay,
        open_features=cut(key).to(dtype),
        open_value=cut(value).to(dtype),
        open_key=cut(key[..., :0] if local is None else local.key).to(dtype),
        open_log_decay=cut(decay[..., None])[..., 0],
        position=seen if before is None else before + seen,
        power=power,
    )


def _both_directions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: LocalPolynomial,
    *,
    power: int,
    offset: float,
    normalize: bool,
    backend: str,
) -> Tensor:
    """Not causal, with exact chunks: what comes before a chunk, the chunk itself unmasked, what comes after it.

    Both directions add up; subtracting a chunk from the sum of all would lose the far tokens to rounding.
    """
    length, missing, dtype = query.shape[2], -query.shape[2] % local.chunk, value.dtype
    if dtype == torch.float16:
        value = value.float()  # numerators before their division leave the range of float16
    pad = partial(torch.nn.functional.pad, pad=(0, 0, 0, missing))
    query, key, value = pad(query), pad(key), pad(value)
    local = local._replace(query=pad(local.query), key=pad(local.key))
    call = partial(_call, power=power, causal=True, offset=0.0, normalize=False, chunk=local.chunk, backend=backend)
    before, before_mass, *_ = call(query, key, value, local, diagonal=Diagonal.FULL)
    after, after_mass, *_ = call(query.flip(2), key.flip(2), value.flip(2), diagonal=Diagonal.NONE)
    numerator = (before + after.flip(2))[:, :, :length]
    if not normalize:
        return numerator.to(dtype)
    mass = (offset + before_mass + after_mass.flip(2))[:, :, :length, None]
    return torch.where(mass == 0, 0.0, numerator / mass.masked_fill(mass == 0, 1.0)).to(dtype)
