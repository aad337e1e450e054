"""`sliding_window_attention`: the public functions, their checks and the choice of backend."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.arguments import (
    check_at_least_one,
    check_attention_tensors,
    check_cache_lengths,
    check_causal_lengths,
    check_devices,
    check_rows,
)
from polysketch.ops.blocks import check_block_size, in_aligned_rows
from polysketch.ops.custom_op import refuse_tangents
from polysketch.ops.packed import PackedDocuments, by_documents
from polysketch.ops.triton.availability import AUTO_DEVICES
from polysketch.ops.window import blockwise, native, operator, reference
from polysketch.ops.window.self_check import program_agrees, programs_agree
from polysketch.ops.window.triton import attend_one, launcher
from polysketch.ops.window.triton import why_not as why_no_program
from polysketch.ops.window.types import BesideKey, Inputs, Plan


def _runs_anywhere(inputs: Inputs) -> str | None:
    return None


class Backend(NamedTuple):
    """One way to compute the op.

    Attributes:
        attend: checked inputs -> (batch, heads, n, value_dim), differentiable in all of them but the mask.
        why_not: why it cannot take tensors like these, None where it can.
    """

    attend: Callable[[Inputs, Plan], Tensor]
    why_not: Callable[[Inputs], str | None] = _runs_anywhere


BACKENDS = {
    "reference": Backend(reference.attend),
    "blockwise": Backend(blockwise.attend),
    "native": Backend(operator.attend, native.why_not),
    "triton": Backend(operator.attend_by_triton, launcher.why_not),
}


def sliding_window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    beside: BesideKey | None = None,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention to the last `window` tokens: token i sees i - window + 1 .. i, itself included.

    Without `causal` it sees as many on its other side too: |i - j| < window. A masked token takes a place in the
    window, and padding before a row's first real token is never in one, so left padding changes nothing.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, length, value_dim); value_dim may differ from head_dim.
        window: tokens that a token sees, at least 1.
        causal: none of them later than itself.
        block_size: tokens of a block, inside which causal attention sees both sides as far as the window reaches; None
            for 1. Blocks count from a row's first real token, and the last may be short.
        key_mask: (batch, length) bool, True for a real token; masked keys get no weight.
        scale: factor on q . k; 1 / sqrt(head_dim) when None.
        beside: one more key for every query, as the sum over all tokens before its window may be.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            attended to by itself. Not beside a `key_mask`.
        backend: "auto" (see `sliding_window_attention_backend`), "native" (a program in C++ on a CPU,
            compiled at its first use), "triton" (programs for CUDA devices: not float64, vectors of up to 128),
            "blockwise" (PyTorch's scaled_dot_product_attention) or "reference" (quadratic, the definition).

    Returns:
        (batch, heads, length, value_dim). A query that sees no real key, nor one beside, gets zeros.

    Raises:
        ValueError: a window below 1, shapes or devices that disagree, queries not as many as keys, an unknown backend.
        TypeError: a size that is no integer, dtypes that are not floating point or not alike, a mask that is not bool.
        RuntimeError: the backend that was asked for cannot run here, with the reason.

    Cost: 2 * length * (window + 31) * (head_dim + value_dim) operations a head by the native backend, forward. The
    blockwise one looks at up to window + 255 keys, on a CPU at window + 63 where the window is short; with a key beside
    its widths are one more. The programs in Triton look at up to window + 190 (bfloat16, on an H100), and keep 4 bytes
    of a query for backward. Memory is linear in the length.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_causal_lengths(query, key)
    if cu_seqlens is not None:

        def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor, key_mask: Tensor | None) -> Tensor:
            own = BesideKey(*rest) if rest else None
            return _attend(query, key, value, key_mask, own, window, causal, block_size, scale, backend)

        return by_documents(
            attend,
            (query, key, value, *(beside or ())),
            cu_seqlens,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
        )
    return _attend(query, key, value, key_mask, beside, window, causal, block_size, scale, backend)


def sliding_window_attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    key_rows: Tensor | None = None,
    scale: float | None = None,
    beside: BesideKey | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal sliding-window attention of the last n queries of a sequence over m keys, for decoding with a cache.

    Query i of n stands at position m - n + i of the keys; the first window - 1 queries need keys from before the
    first, so that a cache of the last window - 1 tokens is enough. Arguments as in `sliding_window_attention`; with a
    `block_size` a block begins with the first of the queries.

    With `key_rows`, (batch,) int64, keys, values and mask are those of a cache of many rows, in which the rows of the
    batch stand at these numbers, in any order. Nothing is differentiated then. One query a row is computed where keys
    and values lie, by the native program on a CPU and by Triton's on a CUDA device; others are computed on a copy.

    Returns:
        (batch, heads, n, value_dim). A query that sees no real key, nor one beside, gets zeros.

    Raises:
        ValueError: more queries than keys, rows that the cache does not have, or as in `sliding_window_attention`.
        TypeError, RuntimeError: as in `sliding_window_attention`.
    """
    if key_rows is not None:
        return _attend_in_cache(
            Inputs(query, key, value, key_mask, *(beside or ())), key_rows, window, block_size, scale, backend
        )
    check_attention_tensors(query, key, value, key_mask)
    check_cache_lengths(query, key)
    return _attend(query, key, value, key_mask, beside, window, True, block_size, scale, backend)


@torch.no_grad()
def _attend_in_cache(
    inputs: Inputs, key_rows: Tensor, window: int, block_size: int | None, scale: float | None, backend: str
) -> Tensor:
    """Of keys, values and mask the rows `key_rows`: one query a row where they lie, if a program does that."""
    query, key = inputs[:2]
    inputs.check_same_rows()
    check_rows(key_rows, query.shape[0], key)
    check_attention_tensors(*inputs.in_rows_like(query)[:4])
    check_at_least_one(window=window)
    if inputs.beside_logit is not None and inputs.beside_value is not None:
        beside = BesideKey(inputs.beside_logit.to(query.dtype), inputs.beside_value.to(query.dtype))
        _check_beside(query, inputs.value, beside)
        inputs = inputs._replace(beside_logit=beside.logit, beside_value=beside.value)
    refuse_tangents("sliding_window_attention_with_cache", *inputs)
    plan = Plan(min(window, key.shape[2]) - 1, 0, query.shape[3] ** -0.5 if scale is None else scale)
    if query.shape[2] == 1 and backend == "auto" and _by_triton(inputs):
        return attend_one(inputs, plan, key_rows)
    picked = _picked(inputs, plan, block_size, backend)
    if query.shape[2] == 1 and picked == "native" and key.dtype == inputs.value.dtype == torch.float32:
        return native.forward(inputs, plan, key_rows)[0]
    own = inputs.taken(key_rows)
    check_cache_lengths(query, own.key)
    if block_size is not None:
        check_block_size(block_size, True)
        if block_size > 1:
            return _attend_by_blocks(picked, own, plan, block_size)
    return BACKENDS[picked].attend(own, plan)


def _by_triton(inputs: Inputs) -> bool:
    """Whether Triton's program takes one query a row over a cache of rows; who traces has plain PyTorch."""
    on_a_device = inputs.query.device.type in AUTO_DEVICES or inputs.query.is_meta
    if not on_a_device or torch.compiler.is_compiling():
        return False
    return why_no_program(inputs) is None and program_agrees(inputs)


def sliding_window_attention_backend(query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> str:
    """The backend that `sliding_window_attention` runs for these tensors.

    "auto" is "native" for float32, bfloat16 and float16 on a CPU with a compiler, "triton" on CUDA devices that can run
    its programs, and "blockwise" elsewhere. Where the programs disagreed with the definition at their first call
    (`ops.triton.self_check`) the answer is "triton" all the same, and the call runs "blockwise".

    Args:
        query, key, value: as for `sliding_window_attention`.
        backend: "auto", "native", "triton", "blockwise" or "reference".

    Raises:
        ValueError: an unknown name.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
    """
    inputs = Inputs(query, key, value)
    if backend == "auto":
        if _on_a_device_of_programs(query) and BACKENDS["triton"].why_not(inputs) is None:
            return "triton"
        return "blockwise" if BACKENDS["native"].why_not(inputs) else "native"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {', '.join(map(repr, sorted(BACKENDS)))}")
    reason = BACKENDS[backend].why_not(inputs)
    if reason is not None:
        raise RuntimeError(reason)
    return backend


def _on_a_device_of_programs(query: Tensor) -> bool:
    elsewhere = not query.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes longer than asking this
    # A graph that is exported is for other machines.
    return elsewhere and query.device.type in AUTO_DEVICES and not torch.compiler.is_exporting()


def _picked(inputs: Inputs, plan: Plan, block_size: int | None, backend: str) -> str:
    """The backend for a call; by "auto" none of programs that disagreed with the definition."""
    picked = sliding_window_attention_backend(*inputs[:3], backend=backend)
    if picked != "triton" or backend == picked:
        return picked
    return picked if programs_agree(inputs, plan, (block_size or 1) > 1) else "blockwise"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    beside: BesideKey | None,
    window: int,
    causal: bool,
    block_size: int | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    check_at_least_one(window=window)
    if beside is not None:
        _check_beside(query, value, beside)
    behind = min(window, key.shape[2]) - 1
    plan = Plan(behind, 0 if causal else behind, query.shape[3] ** -0.5 if scale is None else scale)
    inputs = Inputs(query, key, value, key_mask, *(beside or ()))
    if block_size is not None:
        check_block_size(block_size, causal)
    picked = _picked(inputs, plan, block_size, backend)
    if block_size is not None and block_size > 1:
        return _attend_by_blocks(picked, inputs, plan, block_size)
    return BACKENDS[picked].attend(inputs, plan)


def _attend_by_blocks(picked: str, inputs: Inputs, plan: Plan, block_size: int) -> Tensor:
    """In rows that begin with their first real token, where blocks count from."""
    block = min(block_size, inputs.query.shape[2])
    plan = plan._replace(ahead=min(plan.behind, block - 1), block=block)

    def attend(query: Tensor, key: Tensor, value: Tensor, *beside: Tensor, key_mask: Tensor | None) -> Tensor:
        return BACKENDS[picked].attend(Inputs(query, key, value, key_mask, *beside), plan)

    beside = (x for x in inputs[4:] if x is not None)
    return in_aligned_rows(attend, *inputs[:3], inputs.key_mask, tuple(beside))


def _check_beside(query: Tensor, value: Tensor, beside: BesideKey) -> None:
    check_devices(query=query, logit=beside.logit, value=beside.value)
    expected = query.shape[:3], (*query.shape[:3], value.shape[3])
    if (beside.logit.shape, beside.value.shape) != expected:
        found = tuple(beside.logit.shape), tuple(beside.value.shape)
        raise ValueError(f"beside: expected a logit and a value of {tuple(map(tuple, expected))}, got {found}")
