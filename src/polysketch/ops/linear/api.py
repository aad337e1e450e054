"""`linear_attention`: attention over features, the one op behind every linearised mechanism."""

from typing import Any

from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.linear.aligned import attend
from polysketch.ops.linear.aligned_op import fold
from polysketch.ops.linear.backends import BACKENDS
from polysketch.ops.linear.checks import checked
from polysketch.ops.linear.packed import packed_attention
from polysketch.ops.linear.self_check import programs_agree
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial
from polysketch.ops.packed import PackedDocuments
from polysketch.ops.triton.availability import AUTO_DEVICES

# Batch x heads x queries x keys. Measured with 2 and 12 heads of 64, sketch size 32, with and without a local part: the
# reference is up to three times as fast below, and slower above.
_FEW_WEIGHTS = 65_536


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    power: int = 1,
    factors: int = 1,
    causal: bool = False,
    block_size: int | None = None,
    offset: float = 0.0,
    normalize: bool = True,
    local: LocalPolynomial | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    state: LinearAttentionState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    compute_chunk: int | None = None,
    backend: str = "auto",
) -> LinearAttentionResult:
    """Attention whose weights are products of features, in time linear in the length.

        o_i = sum_j w_ij v_j / (offset + sum_j w_ij)
        w_ij = (phi(q_i) . phi(k_j))^power exp(log_decay_{j+1} + ... + log_decay_i)
        w_ij = (a_i . a_j) (b_i . b_j) exp(...)   with factors = 2, a and b the two halves of phi
        w_ij = (q_i . k_j)^degree              where i and j share an aligned chunk of `local`

    over j <= i when `causal`, over all j otherwise; with a `block_size` b over all blocks of b tokens up to and
    including that of i, i // b >= j // b: causal between blocks and not inside them. A row whose mass,
    offset + sum, is 0 or below the smallest normal number (1e-38 in float32) gives zeros.
    PolySketchFormer (Kacham, Mirrokni, Zhong, ICML 2024), sections 2.2 to 3.2.

    Rounding, in units u = 2^-24 of float32, or 2^-53 for float64 inputs: a sum over tokens before a chunk is wrong by
    at most (t + 3) u of the sum of the sizes of its terms, t = 1,024 or the tokens of a local chunk, however many
    tokens there are; token by token (`linear_attention_extend_`) the bound is another. That holds of the native and the
    chunked backend. At power 2, sums hold products of both signs, which cancel where a query is nearly orthogonal to
    all keys. A mass that is less than 2^-12 (float64: 2^-41) of what the squares of the features alone hold cannot be
    told from rounding; it is taken for so much, and what it lacks is given to the mean of the values by squares. So a
    normalized output is in the range of the values, up to r 2^-11 of the largest. The gradient takes what was given for
    a constant, and the triton backend does not give it.

    Chunk boundaries and positions count from each row's first real token (`key_mask`), across calls when a state is
    passed on; what stands at padding before it is ignored and gives zeros. Masked tokens after it keep their position
    but have no weight and no decay.

    Args:
        query_features: (batch, heads, length, r); float32, bfloat16, float16 or float64, like all inputs.
        key_features: (batch, key_heads, key_length, r); heads is a multiple of key_heads (grouped-query attention).
        value: (batch, key_heads, key_length, value_dim).
        power: 1 or 2. At 2 the features are squared inside, never written out.
        factors: 1 or 2. At 2 the features are two halves (a, b) of r / 2 numbers each, and stand for the products a_i
            b_j, which are never written out. Needs an even r and power 1.
        causal: needs equal query and key lengths.
        block_size: tokens of a block, inside which causal attention sees both sides; None for 1. Blocks count from each
            row's first real token, and the last may be short. A state must stand between two blocks. With `local` it
            divides the chunk or is a multiple of it. Not with `log_decay`.
        offset: added to the denominator, finite and at least 0; 1 in PolySketchFormer.
        normalize: false leaves out the denominator.
        local: exact weights inside aligned chunks; without `causal` unmasked inside.
        log_decay: (batch, key_heads, length), at most 0, causal only; does not act on exact local weights. Less than
            -100, -inf too, is -100: everything before is forgotten. A sequence given in several calls has it in all of
            them or in none.
        key_mask: (batch, key_length) bool, true where a token is real.
        state: of the tokens before these (causal only), treated as a value.
        return_state: whether the state after the last token is returned (causal only).
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            attended to by itself. Not beside a `key_mask` or states.
        compute_chunk: tokens worked on at once where there is no `local`; tuning only, no result depends on it.
        backend: "auto" (see `linear_attention_backend`), "triton" (programs for CUDA devices), "native" (a program in
            C++ on a CPU, compiled at its first use), "chunked" (plain PyTorch) or "reference" (quadratic,
            the definition).

    Returns:
        `.output` (batch, heads, length, value_dim) in the dtype of `value`; `.state` or None; `.denominator` (batch,
        heads, length), offset + sum of weights, in the dtype of sums. Sums are float32, or float64 for float64 inputs,
        also under autocast, which does not touch this op.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with what was expected and what came. A batch
            may be empty, and then outputs and states are; a sequence may not.
        RuntimeError: the native or triton backend was asked for and cannot run here, with the reason.

    Cost, per token and head: 4 e (value_dim + 1) operations for the sums, with e = r at power 1, r (r + 1) / 2 at power
    2 and r^2 / 4 with two factors, and 2 chunk (head_dim + value_dim) / 2 inside chunks; the backward pass about 2.5
    times the forward one. Inside a block of b tokens, all of them are seen: 2 b (r + value_dim) operations where b is
    at most 256 or e / 2; longer blocks cost what a call that is not causal costs, and in memory the sums after each
    block. With `local`, what is not causal, or by blocks of several chunks, costs 8 e (value_dim + 1) and 2 chunk
    (head_dim + value_dim): the sums of the chunks before and of those after are read one by one, for a chunk subtracted
    from the sum of all would lose the far tokens to rounding. Memory beyond inputs and outputs does not grow with the
    length.
    """
    tensors = (query_features, key_features, value)
    options: dict[str, Any] = {
        "power": power,
        "factors": factors,
        "causal": causal,
        "block_size": block_size,
        "offset": offset,
        "normalize": normalize,
        "local": local,
        "log_decay": log_decay,
        "key_mask": key_mask,
        "state": state,
        "return_state": return_state,
        "compute_chunk": compute_chunk,
    }
    if cu_seqlens is not None:
        return packed_attention(linear_attention, tensors, cu_seqlens, backend=backend, **options)
    inputs, plan = checked(*tensors, **options)
    picked = linear_attention_backend(query_features, key_features, value, state=state, backend=backend)
    if backend == "auto" and picked == "triton" and not programs_agree(inputs, plan):
        picked = "chunked"
    with without_autocast(value.device.type):
        if state is None or not state.rounds_sums:
            return attend(BACKENDS[picked], inputs, plan, key_mask, state)
        result = attend(BACKENDS[picked], inputs, plan, key_mask, state.with_sums_in(state.normalizer.dtype))
        after = None if result.state is None else result.state.with_sums_in(state.sums.dtype)
        return result._replace(state=after)


def linear_attention_sums(
    key_features: Tensor,
    value: Tensor,
    *,
    power: int = 1,
    factors: int = 1,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a span of tokens alone adds to the sums of causal `linear_attention`: its state, without any output.

    Sums before the span, decayed by exp of its total log decay, and the span's own are those after it.

    Args:
        key_features: (batch, key_heads, length, r).
        value: (batch, key_heads, length, value_dim).
        power, factors, log_decay: as for `linear_attention`.

    Returns:
        The `sums`, `normalizer` and `log_decay` of a `LinearAttentionState`; differentiable.

    Raises:
        ValueError, TypeError: as for `linear_attention`.

    Cost: 2 e (value_dim + 1) operations a token and key head, half of those of the op.
    """
    options = {
        "causal": True,
        "block_size": None,
        "offset": 0.0,
        "normalize": False,
        "local": None,
        "key_mask": None,
        "state": None,
    }
    inputs, plan = checked(
        *(key_features, key_features, value),
        power=power,
        factors=factors,
        log_decay=log_decay,
        return_state=True,
        compute_chunk=None,
        **options,  # type: ignore[arg-type]
    )
    picked = linear_attention_backend(key_features, key_features, value)
    if picked == "triton" and not programs_agree(inputs, plan):
        picked = "chunked"
    backend = BACKENDS["chunked" if picked == "reference" else picked]
    with without_autocast(value.device.type):
        plan = plan._replace(chunk=backend.compute_chunk.of(value.shape[2]))
        sums, normalizer = fold(inputs, plan, backend)
        if inputs.log_decay is None:
            return sums, normalizer, sums.new_zeros(sums.shape[:2])
        return sums, normalizer, inputs.log_decay.to(sums.dtype).sum(-1)


def linear_attention_backend(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor | None = None,
    *,
    state: LinearAttentionState | None = None,
    backend: str = "auto",
) -> str:
    """The backend that `linear_attention` with these arguments runs, programs that disagree left aside.

    "auto" picks the triton backend on a CUDA device where Triton is installed, for values up to 128 wide (one that
    is not given is taken for such), and the native one for float32, bfloat16 and float16 on a CPU where there is a
    compiler; else, on a CPU, the quadratic reference for so few weights that calls cost more than they compute, and
    the chunked backend for all that is left. Whether the triton backend's programs disagreed at their first call
    (`ops.triton.self_check`) depends on options that are not known here: "triton" is the answer then too, and the
    call runs the chunked backend.

    Raises:
        ValueError: an unknown name, or features that are not (batch, heads, length, width).
        RuntimeError: the native or triton backend was asked for and cannot run here, with the reason.
    """
    for name, tensor in (("query_features", query_features), ("key_features", key_features)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, width), got the shape {tuple(tensor.shape)}")
    if backend == "auto":
        return _picked(query_features, key_features, value, state)
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {', '.join(map(repr, sorted(BACKENDS)))}")
    reason = BACKENDS[backend].why_not(query_features, value)
    if reason is not None:
        raise RuntimeError(reason)
    return backend


def _picked(
    query_features: Tensor, key_features: Tensor, value: Tensor | None, state: LinearAttentionState | None
) -> str:
    if query_features.device.type in AUTO_DEVICES:
        return "chunked" if BACKENDS["triton"].why_not(query_features, value) else "triton"
    if query_features.device.type != "cpu":
        return "chunked"
    if BACKENDS["native"].why_not(query_features, value) is None:
        return "native"
    weights = query_features.shape[0] * query_features.shape[1] * query_features.shape[2] * key_features.shape[2]
    return "reference" if weights <= _FEW_WEIGHTS and state is None else "chunked"


def lower_triangular_multiply(
    a: Tensor, b: Tensor, c: Tensor, *, power: int = 1, compute_chunk: int | None = None
) -> Tensor:
    """lt((A B^T)^power) C: row i sums (a_i . b_j)^power c_j over j <= i, without the n x n matrix.

    PolySketchFormer, section 3.1. Any length, also one that is no multiple of the chunk.

    Args:
        a, b: (batch, heads, length, m).
        c: (batch, heads, length, width).
        power: 1 or 2, entrywise.
        compute_chunk: tokens worked on at once; the result does not depend on it.

    Returns:
        (batch, heads, length, width), dtype of c.
    """
    return linear_attention(a, b, c, power=power, causal=True, normalize=False, compute_chunk=compute_chunk).output
