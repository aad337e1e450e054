"""The op: checks, rows with padding, short sequences, and which algorithm."""

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_attention_tensors, check_causal_lengths
from polysketch.ops.autocast import without_autocast
from polysketch.ops.hyper.approximate import Options, attend_approximately, attend_by_halves
from polysketch.ops.hyper.backends import check_backend, picked_backend
from polysketch.ops.hyper.calls import attend_by_programs
from polysketch.ops.hyper.capping import check_capping
from polysketch.ops.hyper.exact_keys import check_heavy_mask
from polysketch.ops.hyper.part import Partial
from polysketch.ops.hyper.samples import SAMPLING
from polysketch.ops.hyper.sort_lsh import check_hyperplanes
from polysketch.ops.linear.alignment import Alignment, leading_padding
from polysketch.ops.polynomial.reference import real_tokens, working_dtype
from polysketch.ops.softmax import softmax_attention


def hyper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    hyperplanes: Tensor,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 256,
    sample_size: int = 256,
    min_length: int = 4096,
    sampling: str = "uniform",
    seed: int = 0,
    heavy_mask: Tensor | None = None,
    capping: tuple[float, float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention in nearly linear time: the largest weights exactly, the others from samples (HyperAttention).

    o_i = (sum over S_i of w_ij v_j + sum over l in R of a_l w_il v_l) / (sum over S_i of w_ij + sum over l in U of c
    w_il), with w_ij = exp(scale * q_i . k_j). S_i is a chunk of keys that are near the query, found by sortLSH
    (arXiv:2310.05869, algorithm 1): keys are sorted by the Gray-code rank of the hyperplanes' sides on which they lie,
    and cut into chunks. Samples stand for the keys outside of S_i, those inside S_i count for nothing. The denominator
    has the samples U (algorithm 2): `sample_size` different keys, each set equally likely, and c = (keys outside S_i) /
    (samples outside S_i). The paper's draws may repeat, so that no number of them would be exact. The samples R of the
    numerator are, by `sampling`:

    - "uniform": those of the denominator, a = c, as in the paper's experiments (section 4).
    - "norm" (algorithm 3, Lemma 2): independent draws of their own with P(l) proportional to |v_l|^2, and a_l = 1 /
      (sample_size P(l)). The backward pass takes a as given. A value of zero is never drawn, and its key counts in the
      denominator all the same. Weights do not sum to 1 then, so that an output may leave the range of the values.
      Departing from algorithm 3, which samples the whole numerator, that of the keys in S_i is exact.

    Either sum is unbiased over seeds for its exact one. The exception is a uniform draw that lies in S_i altogether,
    which leaves out the keys outside of it. It needs a `sample_size` of at most `chunk_size`, and is likely only where
    S_i holds much of the keys and samples are few: one sample, and half of 32 keys in S_i, make a sum 19 % too small.
    The quotient is biased by about the square of the denominator's relative error.

    Draws depend on the seed, the key head and positions alone, so the same call gives the same numbers, in
    recomputation and on any batch too. Hashes and draws are per key head, and have no gradient; queries, keys and
    values have the exact one of the formula.

    Without `causal`, rows of as many queries as keys follow the paper: query i and key j meet if they are in the same
    chunk, each of its own order. Else a query goes to the chunk with the middle key of its bucket.

    With `causal` (algorithm 4), tokens are cut into blocks of `min_length` from the row's first real token on. A query
    attends to its own block exactly, and to each of the spans of 1, 2, 4, ... blocks that make up what is before by a
    chunk and samples of that span, as above. Departing from the paper, which cuts at half of the length and sorts
    queries among themselves, places are fixed and a query goes to the chunk with the middle key of its bucket: so later
    tokens change nothing before them. Rows up to position min_length - 1 are exact, and all rows where every span has
    no more keys than `sample_size` or `chunk_size`.

    With `heavy_mask` the caller names the large entries instead: pairs of aligned chunks of queries and of keys,
    counted from a row's first real token, in place of S_i. With `causal`, what it says of a query's own block of
    `min_length` and of later ones does not matter.

    With `capping` = (epsilon, kappa) the denominator has algorithm 2's bounds, which no heavy sample and no unlucky
    draw moves far: with D_i the sum of w_ij over S_i, it is D_i + max(sum over U of c min(w_il, C_i), tau / kappa).
    tau is the largest exact sum outside of S_j over `sample_size` drawn queries j of the same head, and C_i = epsilon^2
    m / (n log n) (D_i + tau / kappa) for m samples of n keys. Numerators stay, unless e^30 times too large, so that an
    output may leave the range of the values. The denominator is biased, and samples of all keys are not exact any more;
    a chunk of all keys is. With `causal`, all this is done for each span; departing from the paper, tau of query i is
    that of the drawn queries up to i then, the first of the span always among them, since others would let later tokens
    move earlier rows. tau is a constant to the backward pass. The paper leaves a constant factor of C_i open; it is 1
    here, with which an epsilon of 0.5 caps ordinary weights, too: of 512 Gaussian tokens it doubles the error, and 3
    leaves it as it is.

    Rows of at most `min_length` real keys are exact. Padding counts for nothing, also in the numbers of keys.

    Args:
        query: (batch, heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, key_length, value_dim); value_dim may differ from head_dim.
        hyperplanes: (head_dim, bits) floating point, Gaussian; 7 bits in the paper.
        causal: query i sees the keys j <= i only; needs equal lengths.
        key_mask: (batch, key_length) bool, True for a real token. With equal lengths it is taken to be that of the
            queries, too.
        scale: factor on q . k; 1 / sqrt(head_dim) when None. The paper has 1, and scaled queries.
        chunk_size: keys of a chunk.
        sample_size: keys of a draw, for each key head, and with `causal` for each span.
        min_length: up to which rows are exact.
        sampling: how keys are drawn for the numerator, "uniform" or "norm".
        seed: of the draws; any whole number.
        heavy_mask: (batch or 1, heads or 1, query chunks, key chunks) bool, of chunks of `chunk_size` tokens, the last
            one perhaps shorter: True where a chunk of queries attends to a chunk of keys exactly. Costs what the query
            chunk with the most would cost in all; chunk_size=1 makes it a mask of entries, for short sequences.
        capping: (epsilon, kappa), bounds of the denominator, epsilon above 0 and kappa, the paper's bound on the ratio
            of the largest to the smallest sum outside of S_i, from 1 on; None for none, as in the paper's experiments.
        backend: "plain" (PyTorch's operations), "native" (programs in C++, float32 on a CPU), "triton" (programs for
            CUDA devices: not float64, vectors of up to 128), or "auto": programs where they can, else "plain". Programs
            take uniform draws without `capping`.

    Returns:
        (batch, heads, query_length, value_dim) in the dtype of value, computed in float32 or float64 where it is not
        exact throughout (then as `softmax_attention`). Queries that see no real key get zeros.

    Raises:
        ValueError: a size below 1, an unknown sampling or backend, hyperplanes of another width, shapes or devices that
            disagree, `causal` with different lengths, or with a mask whose chunks do not divide `min_length`.
        TypeError: a size that is not an integer, dtypes that are not floating point or not alike, or a mask that is
            not bool.
        RuntimeError: the backend that was asked for cannot compute the call, with the reason.

    Cost: 2 * (chunk_size + sample_size) * (head_dim + value_dim) operations a query, and twice that for each doubling
    of `min_length` up to the length, over two, when causal; besides min_length / 2 exact keys then. "norm" adds 2 *
    sample_size * head_dim, for its other draw. Memory is linear in the length, forward and backward. `capping` costs
    once more the samples' scores, 2 * sample_size * head_dim, for them and for tau, and keeps 2 * sample_size numbers a
    query for the backward pass. Programs keep 8 * (chunk_size + sample_size) bytes for 128 queries and span size.
    Those in Triton keep the output in float32 besides, and their backward pass takes up to half a GiB for gradients of
    keys that are not added up yet; they multiply in the dtype of the inputs.
    """
    check_attention_tensors(query, key, value, key_mask)
    if value.shape[3] == 0:
        raise ValueError(f"value must be at least 1 wide, got the shape {tuple(value.shape)}")
    check_hyperplanes(hyperplanes, query.shape[3])
    check_options(chunk_size, sample_size, min_length, sampling, seed)
    bounds = check_capping(capping)
    check_backend(backend, query, key, value, sampling, capping)
    if heavy_mask is not None:
        check_heavy_mask(heavy_mask, query, key, chunk_size)
    if causal:
        check_causal_lengths(query, key)
        if heavy_mask is not None and min_length % chunk_size:
            raise ValueError(
                f"heavy_mask with causal needs a min_length that is a multiple of chunk_size, so that no chunk belongs"
                f" to two spans, got {min_length} and {chunk_size}"
            )
    if key.shape[2] <= min_length or not query.shape[0]:  # of no rows it is all the same
        return softmax_attention(query, key, value, causal=causal, key_mask=key_mask, scale=scale)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    options = Options(hyperplanes, chunk_size, sample_size, sampling, seed, scale, heavy_mask, bounds)
    with without_autocast(query.device.type):
        backend = picked_backend(backend, query, key, value, causal, key_mask is not None, options)
        wider = _shared_dtype if backend == "triton" else working_dtype
        dtype = wider(query, key, value)
        keys, values = (real_tokens(x.to(dtype), key_mask) for x in (key, value))
        output = _attend_aligned(query.to(dtype), keys, values, causal, key_mask, min_length, options, backend)
        return output.to(value.dtype)


def _shared_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    """Inputs that differ, as under autocast, meet in the wider one."""
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)


def _attend_aligned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    min_length: int,
    options: Options,
    backend: str,
) -> Tensor:
    """Move every row's first real token to the front, so that padding before it changes no position."""
    if mask is None:
        return _attend(query, key, value, causal, None, min_length, options, backend)
    start = leading_padding(mask)
    alignment = Alignment(start, torch.zeros_like(start), 0, key.shape[2])
    own_tokens = query.shape[2] == key.shape[2]
    queries = alignment.to_aligned(query) if own_tokens else query
    keys, values = alignment.to_aligned(key), alignment.to_aligned(value)
    real = alignment.to_aligned(mask[:, None, :, None].to(key.dtype))[:, 0, :, 0] > 0
    output = _attend(queries, keys, values, causal, real, min_length, options, backend)
    if not causal:
        output = _with_exact_short_rows(output, queries, keys, values, real, min_length, options.scale)
    return alignment.from_aligned(output) if own_tokens else output


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    real: Tensor | None,
    min_length: int,
    options: Options,
    backend: str,
) -> Tensor:
    """Aligned rows, longer than `min_length`."""
    if not causal and options.heavy is not None:
        options = options._replace(heavy=options.heavy.unsqueeze(2))
    if backend != "plain":
        return attend_by_programs(query, key, value, real, causal, min_length, options, backend)
    grouped = query.unflatten(1, (key.shape[1], -1))
    if causal:
        return attend_by_halves(grouped, key, value, real, min_length, options).output.flatten(1, 2)
    return _attend_freely(grouped, key, value, real, options).output.flatten(1, 3)


def _attend_freely(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, options: Options) -> Partial:
    """All keys are one node, and so are all queries."""
    real = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if real is None else real
    start = torch.zeros(1, dtype=torch.int64, device=key.device)
    by_rank = query.shape[3] == key.shape[2]
    queries, keys, values = (x.unsqueeze(2) for x in (query, key, value))
    return attend_approximately(queries, keys, values, real.unsqueeze(1), start, by_rank, options)


def _with_exact_short_rows(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, real: Tensor, min_length: int, scale: float
) -> Tensor:
    """Rows of the batch with at most `min_length` real keys, attended exactly."""
    short = (real.sum(1) <= min_length).nonzero()[:, 0]
    if short.numel() == 0:
        return output
    exact = softmax_attention(query[short], key[short], value[short], key_mask=real[short], scale=scale)
    return output.index_copy(0, short, exact.to(output.dtype))


def check_options(chunk_size: int, sample_size: int, min_length: int, sampling: str, seed: int) -> None:
    """Refuse options of `hyper_attention` that mean nothing.

    Raises:
        ValueError: a size below 1, or an unknown sampling.
        TypeError: a size or a seed that is not an integer.
    """
    sizes = {"chunk_size": chunk_size, "sample_size": sample_size, "min_length": min_length}
    check_at_least_one(**sizes)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if sampling not in SAMPLING:
        raise ValueError(f"unknown sampling {sampling!r}; known samplings: {', '.join(SAMPLING)}")
