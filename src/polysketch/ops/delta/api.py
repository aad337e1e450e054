"""The delta rule's public functions, their checks and the choice of backend."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.arguments import check_devices
from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import refuse_tangents
from polysketch.ops.delta import operator, reference
from polysketch.ops.delta.operator import aligned_columns
from polysketch.ops.delta.self_check import programs_agree, steps_agree
from polysketch.ops.delta.triton import decoding
from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear import (
    LinearAttentionState,
    StateRows,
    linear_attention,
    linear_attention_extend_,
    native,
)
from polysketch.ops.linear.checks import checked
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.packed import PackedDocuments, by_documents
from polysketch.ops.triton.availability import AUTO_DEVICES

_BACKENDS = ("reference", *operator.BACKENDS)


def delta_writes(
    key_features: Tensor,
    value: Tensor,
    strength: Tensor,
    *,
    factors: int = 1,
    state: LinearAttentionState | None = None,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    backend: str = "auto",
) -> Tensor:
    """What each token writes by the delta rule: the part of its value that the tokens before it do not say yet.

        u_j = s_j (v_j - sum over i < j of w_ji u_i),   w_ji = phi(k_j) . phi(k_i)
        w_ji = (a_j . a_i) (b_j . b_i)                  with factors = 2, a and b the two halves of phi

    Causal `linear_attention` with `normalize=False` over u in place of v is then the delta rule: sums S answer a key
    with S phi(k), and every token moves that answer toward its own value by the share s. It is stable where keys are
    no longer than one and strengths between 0 and 1. Schlag et al., "Linear Transformers Are Secretly Fast Weight
    Programmers" (ICML 2021), section 4.2; products of two sketches in place of phi are those of PolySketchFormer.

    Args:
        key_features: (batch, heads, length, r); float32, bfloat16, float16 or float64.
        value: (batch, heads, length, value_dim).
        strength: (batch, heads, length), s; 0 for a token that writes nothing, as padding does.
        factors: 1, or 2 where features are two halves (a, b) that stand for the products a_i b_j.
        state: of the tokens before these, as `linear_attention` with power 1 and no local part gives it; treated as a
            value.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            written by itself. Not beside a `state`.
        backend: "auto" (see `delta_writes_backend`), "triton" (programs for CUDA devices), "native" (a program in C++
            for float32 on a CPU, compiled at its first use), "chunked" (plain PyTorch) or "reference" (quadratic, the
            definition).

    Returns:
        (batch, heads, length, value_dim), in float32 or, of float64 inputs, in that. Programs in Triton make products
        of TF32 where key features come in half precision, and gradients of features by products in that.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with what was expected and what came.
        RuntimeError: the native or triton backend was asked for and cannot run here, with the reason.

    Cost, a token and head: 4 e value_dim operations, e = r or (r / 2)^2; the backward pass about 4.5 times as much.
    Tokens of a head are worked on in order: only heads and rows of the batch are independent, on a GPU blocks of value
    columns too. Programs in Triton keep 64 numbers a token and head besides, while they run.
    """
    inputs = _inputs(key_features, value, strength, factors, state)
    if cu_seqlens is not None:
        if state is not None:
            raise ValueError("documents of cu_seqlens begin without a past: a state cannot be given beside")

        def write(key: Tensor, value: Tensor, strength: Tensor, *, key_mask: None) -> Tensor:
            return delta_writes(key, value, strength, factors=factors, backend=backend)

        return by_documents(write, [key_features, value, strength], cu_seqlens, causal=True)
    return _writes(inputs, factors, _half(key_features), backend)


def _writes(inputs: Inputs, factors: int, half: torch.dtype | None, backend: str) -> Tensor:
    """`delta_writes` of checked tensors in the dtype of sums, which came in this half precision."""
    picked = delta_writes_backend(inputs.key, backend=backend)
    if backend == "auto" and inputs.key.shape[2] == 1:  # no token before it: one product, and no copy of the sums
        picked = "reference"
    if backend == "auto" and picked == "triton" and not programs_agree(inputs, factors, half):
        picked = "chunked"
    if picked != "reference":
        return operator.writes(inputs, factors, picked, half if picked == "triton" else None)
    with without_autocast(inputs.value.device.type):
        return reference.writes(inputs, factors)


def _half(key_features: Tensor) -> torch.dtype | None:
    """What products may be rounded to, because features were; None for float32 and float64."""
    return key_features.dtype if key_features.dtype in (torch.bfloat16, torch.float16) else None


def _rounded_for_programs(
    query: Tensor, key: Tensor, written: Tensor, half: torch.dtype | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """In half precision where features came in it and programs on a device multiply them: by tensor cores.

    What is written is then of a width that lies on the bounds of memory's words, with zeros behind.
    """
    if half is None or key.device.type not in AUTO_DEVICES or backend not in ("auto", "triton"):
        return query, key, written
    return query.to(half), key.to(half), aligned_columns(written.to(half))


def delta_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    strength: Tensor,
    *,
    factors: int = 1,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    backend: str = "auto",
) -> Tensor:
    """What sums that are written by the delta rule answer to each query, the query's own token included.

        o_i = sum over j <= i of w_ij u_j,   u as `delta_writes` gives it, w_ij = phi(q_i) . phi(k_j)

    It is `delta_writes`, and `linear_attention` over the writes with `normalize=False`; the native backend makes both
    in one pass over the sums. From a state, call the two.

    Args:
        query_features: (batch, heads, length, r); heads is a multiple of the heads of keys (grouped-query attention).
        key_features, value, strength, factors, cu_seqlens, backend: as for `delta_writes`.

    Returns:
        (batch, heads, length, value_dim), in float32 or, of float64 inputs, in that.

    Raises:
        ValueError, TypeError, RuntimeError: as `delta_writes` and `linear_attention` do.

    Cost, a token and head: 6 e value_dim operations by the native backend and 8 by others, e = r or (r / 2)^2; the
    backward pass 14 by the native one and 24 by others. Where that is less, the native backend reads the tokens
    themselves, and not sums over them: 2 length (r + value_dim), and 2 length (5 r + 3 value_dim) backward.
    """
    inputs = _inputs(key_features, value, strength, factors, None)
    _require_floating(query_features=query_features)
    query = query_features.to(inputs.key.dtype)
    _check_query(query, inputs.key)
    given: dict[str, Any] = {"factors": factors, "backend": backend}
    if cu_seqlens is not None:

        def attend(*tensors: Tensor, key_mask: None) -> Tensor:
            return delta_attention(*tensors, **given)

        given_tokens = [query_features, key_features, value, strength]
        return by_documents(attend, given_tokens, cu_seqlens, causal=True)
    if delta_writes_backend(inputs.key, backend=backend) == "native":
        return operator.attention(query, inputs, factors)
    half = _half(key_features)
    written = _writes(inputs, factors, half, backend)
    operands = _rounded_for_programs(query, inputs.key, written, half, backend)
    found = linear_attention(*operands, causal=True, normalize=False, **given).output
    return found[..., : written.shape[3]].to(written.dtype)


@torch.no_grad()
def delta_attention_extend_(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    strength: Tensor,
    state: LinearAttentionState | StateRows,
    *,
    factors: int = 1,
) -> Tensor:
    """`delta_attention` of the next tokens; `state` moves on in place, at the same addresses.

    Args:
        query_features, key_features, value, strength, factors: as for `delta_attention`.
        state: of the tokens before, of power 1 and without a local part; or rows of one, each where it lies.

    Returns:
        (batch, heads, length, value_dim), in float32 or, of float64 inputs, in that. Nothing is differentiated.

    Raises:
        ValueError, TypeError: as `delta_writes` and `linear_attention_extend_` do.

    Cost of one token by the native program, a key head: `state.sums` are read and written once. The triton program
    reads them from memory once, and from caches once more and once for each further query of a key head. Plain PyTorch
    reads them three times, and copies `StateRows` before and after.
    """
    inputs = _inputs(key_features, value, strength, factors, state)
    _require_floating(query_features=query_features)
    query = query_features.to(inputs.key.dtype)
    _check_query(query, inputs.key)
    is_step = inputs.key.shape[2] == 1
    if is_step and _by_triton(query, inputs, factors, state):
        refuse_tangents("delta_attention_extend_", query, *inputs[:3])
        return decoding.extend_one_(query, inputs, state, factors)
    if is_step and native.can_extend(query, state):
        refuse_tangents("delta_attention_extend_", query, *inputs[:3])
        given, plan = checked(
            query,
            inputs.key,
            inputs.value,
            power=1,
            factors=factors,
            causal=True,
            block_size=None,
            offset=0.0,
            normalize=False,
            local=None,
            log_decay=None,
            key_mask=None,
            state=state,
            return_state=True,
            compute_chunk=None,
        )
        return native.extend_one_(given, plan, state, inputs.strength)[0]
    if isinstance(state, StateRows):
        given_tokens = (query_features, key_features, value, strength)
        return state.on_a_copy(lambda own: delta_attention_extend_(*given_tokens, own, factors=factors))
    half = _half(key_features)
    written = _writes(inputs, factors, half, "auto")
    query, key, _ = _rounded_for_programs(query, inputs.key, written, half, "auto")
    own = written.to(key.dtype)  # as wide as the state
    found = linear_attention_extend_(query, key, own, state, factors=factors, normalize=False).output
    return found.to(written.dtype)


def _by_triton(query: Tensor, inputs: Inputs, factors: int, state: LinearAttentionState | StateRows) -> bool:
    """Whether Triton's program takes the token; who traces has the operators of several."""
    on_a_device = inputs.key.device.type in AUTO_DEVICES or inputs.key.is_meta
    if not on_a_device or torch.compiler.is_compiling():
        return False
    if decoding.why_not_extend(inputs.key, state) is not None:
        return False
    return steps_agree(query, inputs, factors, state)


def delta_writes_backend(key_features: Tensor, *, backend: str = "auto") -> str:
    """The backend that `delta_writes` runs for these features, programs that disagree left aside.

    "auto" picks the triton backend on a CUDA device where Triton is installed, the native one on a CPU where there
    is a compiler, and else the chunked one. Where the triton backend's programs disagreed at their first call
    (`ops.triton.self_check`), "triton" is the answer too, and the call runs the chunked backend.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the native or triton backend was asked for and cannot run here, with the reason.
    """
    if backend not in ("auto", *_BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {', '.join(map(repr, sorted(_BACKENDS)))}")
    if backend == "reference":
        return backend
    inputs = Inputs(key_features, key_features, key_features)
    if backend == "auto":
        fastest = "triton" if key_features.device.type in AUTO_DEVICES else "native"
        return "chunked" if operator.BACKENDS[fastest].why_not(inputs) else fastest
    reason = operator.BACKENDS[backend].why_not(inputs)
    if reason is not None:
        raise RuntimeError(reason)
    return backend


def _inputs(
    key_features: Tensor,
    value: Tensor,
    strength: Tensor,
    factors: int,
    state: LinearAttentionState | StateRows | None,
) -> Inputs:
    """The checked tensors, in the dtype of sums; with the sums of a state that is not rows of another."""
    _require_floating(key_features=key_features, value=value, strength=strength)
    dtype = torch.promote_types(value.dtype, torch.float32)
    sums = state.sums.to(state.normalizer.dtype) if isinstance(state, LinearAttentionState) else None
    inputs = Inputs(key_features.to(dtype), value.to(dtype), strength.to(dtype), sums)
    _check(inputs, factors, state)
    return inputs


def _require_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def _check_query(query: Tensor, key: Tensor) -> None:
    fits = query.dim() == 4 and (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
    if not fits or query.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query_features must be (batch, heads, length, width) as key_features {tuple(key.shape)} with a multiple "
            f"of their heads, got {tuple(query.shape)}"
        )
    check_devices(query_features=query, key_features=key)


def _check(inputs: Inputs, factors: int, state: LinearAttentionState | StateRows | None) -> None:
    key, value, strength, _ = inputs
    for name, tensor in (("key_features", key), ("value", value)):
        if tensor.dim() != 4 or 0 in tensor.shape[1:]:
            raise ValueError(
                f"{name} must be (batch, heads, length, width), only the batch may be 0, got {tuple(tensor.shape)}"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[:3] != strength.shape:
        raise ValueError(
            "key_features, value and strength must agree in batch, heads and length, got "
            f"{tuple(key.shape)}, {tuple(value.shape)} and {tuple(strength.shape)}"
        )
    if type(factors) is not int or factors not in (1, 2) or key.shape[3] % factors:
        raise ValueError(f"factors must be 1, or 2 with features of an even width, got {factors!r} and {key.shape[3]}")
    check_devices(key_features=key, value=value, strength=strength)
    if state is None:
        return
    sums = state.pool.sums
    expected = (*key.shape[:2], expanded_size(key.shape[3], 1, factors), value.shape[3])
    found = (state.batch_size, *sums.shape[1:])
    if found != expected or state.power != 1 or state.factors != factors or state.local_chunk:
        raise ValueError(
            f"the state does not fit: expected sums {expected} of power 1, factors {factors} and no local part, got "
            f"{found}, power {state.power}, factors {state.factors}, chunks of {state.local_chunk}"
        )
    if state.pool.normalizer.dtype != value.dtype:
        raise TypeError(
            f"the state's sums are {state.pool.normalizer.dtype}, the tokens {value.dtype}: cast the tokens"
        )
    check_devices(key_features=key, state=sums)
