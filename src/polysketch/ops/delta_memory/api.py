"""`delta_memory` and its decoding twin: the public functions, their checks and the choice of backend."""

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_devices
from polysketch.ops.delta_memory import chunked, native, operator, reference
from polysketch.ops.delta_memory.state import DeltaMemoryState
from polysketch.ops.delta_memory.types import Inputs
from polysketch.ops.packed import PackedDocuments, by_documents

_BACKENDS = ("chunked", "native", "reference")


def delta_memory(
    query_cells: Tensor,
    query_weights: Tensor,
    key_cells: Tensor,
    key_weights: Tensor,
    value: Tensor,
    strength: Tensor,
    *,
    size: int,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    backend: str = "auto",
) -> Tensor:
    """What every query recalls from a memory that the tokens up to its own have written by the delta rule.

        S_j = S_{j-1} + phi(k_j) u_j^T,   u_j = s_j (v_j - S_{j-1}^T phi(k_j)),   r_i = S_i^T phi(q_i)

    phi = a (x) b, of two vectors over `size` cells each that are zero but for k of them. So S has size^2 rows, and a
    token reads and writes k^2 of them: the memory can be large at little cost. Every token moves what the memory says
    of its key toward its value by the share s; that is stable where a and b are no longer than one and 0 <= s <= 1.
    The rule is that of Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers" (ICML 2021), section
    4.2, the product of two short codes that of Lample et al., "Large Memory Layers with Product Keys" (NeurIPS 2019).

    Args:
        query_cells: (batch, heads, length, 2 k) int32, cells 0..size - 1 of a, then of b; a cell named twice counts as
            the sum of its weights. `heads` is a multiple of `key_heads`.
        query_weights: (batch, heads, length, 2 k), the weights there; float32, bfloat16, float16 or float64.
        key_cells, key_weights: (batch, key_heads, length, 2 k), the same of keys.
        value: (batch, key_heads, length, value_dim).
        strength: (batch, key_heads, length), s; 0 for a token that writes nothing, as padding does.
        size: cells of each of the two vectors.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            with a memory of its own.
        backend: "auto" (see `delta_memory_backend`), "native" (a program in C++ for float32 on a CPU, compiled at its
            first use), "chunked" (plain PyTorch) or "reference" (quadratic, the definition).

    Returns:
        (batch, heads, length, value_dim), in float32 or, of float64 inputs, in that; differentiable once in weights,
        value and strength.

    Raises:
        ValueError, TypeError: shapes, dtypes, cells or options that do not fit, with what was expected and what came.
        RuntimeError: the native backend was asked for and cannot run here, with the reason.

    Cost, a token: 2 k^2 value_dim operations for each query head and twice that for each key head, the backward pass
    about three times as much, and size^2 value_dim numbers of memory a row and key head. Tokens of a head are worked
    on in order: only heads and rows of the batch are independent.
    """
    inputs = _checked(Inputs(query_cells, query_weights, key_cells, key_weights, value, strength), size)
    if cu_seqlens is not None:

        def recall(*rows: Tensor, key_mask: None) -> Tensor:
            return delta_memory(*rows, size=size, backend=backend)

        return by_documents(recall, inputs, cu_seqlens, causal=True)
    picked = delta_memory_backend(inputs.value, backend=backend)
    with torch.autocast(value.device.type, enabled=False):
        if picked == "native":
            return operator.recall(inputs, size)
        return (reference if picked == "reference" else chunked).recall(inputs, size)[0]


def delta_memory_after(
    query_cells: Tensor,
    query_weights: Tensor,
    key_cells: Tensor,
    key_weights: Tensor,
    value: Tensor,
    strength: Tensor,
    state: DeltaMemoryState,
) -> tuple[Tensor, DeltaMemoryState]:
    """`delta_memory` of a later part of a sequence: gradients pass to the memory before it, and from that after it.

    Args:
        query_cells, query_weights, key_cells, key_weights, value, strength: as for `delta_memory`.
        state: of the tokens before these, treated as a value.

    Returns:
        As `delta_memory`, by the chunked backend; and the state after the last token.

    Raises:
        ValueError, TypeError: as there, or the state is of other sizes.

    Cost: as there, and for the backward pass a memory of size^2 value_dim numbers for every 32 tokens.
    """
    inputs = _checked(Inputs(query_cells, query_weights, key_cells, key_weights, value, strength), state.size)
    _check_state(inputs, state)
    with torch.autocast(value.device.type, enabled=False):
        recalled, _, sums = chunked.recall(inputs, state.size, state.sums)
    return recalled, DeltaMemoryState(sums, state.size)


@torch.no_grad()
def delta_memory_extend_(
    query_cells: Tensor,
    query_weights: Tensor,
    key_cells: Tensor,
    key_weights: Tensor,
    value: Tensor,
    strength: Tensor,
    state: DeltaMemoryState,
    *,
    backend: str = "auto",
) -> Tensor:
    """`delta_memory` for the next tokens of a sequence: the state moves on in place.

    Args:
        query_cells, query_weights, key_cells, key_weights, value, strength, backend: as for `delta_memory`.
        state: of the tokens before these.

    Returns:
        As `delta_memory`; no gradients.

    Raises:
        ValueError, TypeError, RuntimeError: as there, or the state is of other sizes; the state is then as it was.
    """
    inputs = _checked(Inputs(query_cells, query_weights, key_cells, key_weights, value, strength), state.size)
    _check_state(inputs, state)
    if delta_memory_backend(inputs.value, backend=backend) == "native":
        return native.recall(inputs, state.size, state.sums)[0]
    recalled, _, sums = chunked.recall(inputs, state.size, state.sums)
    state.sums.copy_(sums)
    return recalled


def delta_memory_backend(value: Tensor, *, backend: str = "auto") -> str:
    """The backend that `delta_memory` runs for such values: "auto" is "native" where that can run, else "chunked".

    Raises:
        ValueError: an unknown name.
        RuntimeError: the native backend was asked for and cannot run here, with the reason.
    """
    if backend not in ("auto", *_BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {', '.join(map(repr, _BACKENDS))}")
    reason = native.why_not(value)
    if backend == "native" and reason is not None:
        raise RuntimeError(reason)
    if backend == "auto":
        return "chunked" if reason else "native"
    return backend


def _checked(inputs: Inputs, size: int) -> Inputs:
    """The same in one dtype, float32 or float64."""
    check_at_least_one(size=size)
    _check_dtypes(inputs)
    _check_shapes(inputs)
    check_devices(**inputs._asdict())
    for name in ("query_cells", "key_cells"):
        _check_cells(name, getattr(inputs, name), size)
    dtype = torch.promote_types(inputs.value.dtype, torch.float32)
    return Inputs(*(x if x.dtype == torch.int32 else x.to(dtype) for x in inputs))


def _check_state(inputs: Inputs, state: DeltaMemoryState) -> None:
    value = inputs.value
    expected = (*value.shape[:2], state.size**2, value.shape[3])
    if tuple(state.sums.shape) != expected or state.sums.dtype != value.dtype:
        raise ValueError(
            f"the state does not fit: expected sums {expected} in {value.dtype}, got "
            f"{tuple(state.sums.shape)} in {state.sums.dtype}"
        )
    check_devices(value=value, state=state.sums)


def _check_dtypes(inputs: Inputs) -> None:
    for name, tensor in inputs._asdict().items():
        if name.endswith("cells") and tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {tensor.dtype}")
        if not name.endswith("cells") and not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def _check_shapes(inputs: Inputs) -> None:
    query, key, value = inputs.query_weights.shape, inputs.key_weights.shape, inputs.value.shape
    for name, shape in (("query_weights", query), ("key_weights", key), ("value", value)):
        if len(shape) != 4 or 0 in shape[1:]:
            raise ValueError(
                f"{name} must be (batch, heads, length, width), only the batch may be 0, got {tuple(shape)}"
            )
    if inputs.query_cells.shape != query or inputs.key_cells.shape != key:
        raise ValueError(
            f"cells and weights must have one shape, got {tuple(inputs.query_cells.shape)} and {tuple(query)} of "
            f"queries, {tuple(inputs.key_cells.shape)} and {tuple(key)} of keys"
        )
    if key[3] % 2 or query[3] != key[3]:
        raise ValueError(f"weights must be of two vectors of one length, an even width, got {query[3]} and {key[3]}")
    if key[:3] != value[:3] or key[:3] != inputs.strength.shape or (query[0], query[2]) != (key[0], key[2]):
        raise ValueError(
            "query, key, value and strength must agree in batch, heads and length, got "
            f"{tuple(query)}, {tuple(key)}, {tuple(value)} and {tuple(inputs.strength.shape)}"
        )
    if query[1] % key[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {query[1]} and {key[1]}")


def _check_cells(name: str, cells: Tensor, size: int) -> None:
    """On a CPU, where looking costs nothing: a program must not write beyond its memory."""
    if cells.device.type != "cpu" or torch.compiler.is_compiling() or not cells.numel():
        return
    low, high = cells.aminmax()
    if low < 0 or high >= size:
        raise ValueError(f"{name} must be cells 0 to {size - 1}, got {int(low)} to {int(high)}")
