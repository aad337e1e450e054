"""Attention through a few landmarks, bidirectional only: Nystromformer and Skyformer, in linear time."""

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_attention_tensors
from polysketch.ops.autocast import without_autocast
from polysketch.ops.polynomial.reference import real_tokens, working_dtype
from polysketch.ops.softmax import masked_attention

SAMPLE_RANGE = 2**31  # of the integers that stand for numbers in [0, 1)
_ITERATIONS = 6
_MOST_ITERATIONS = 1000  # the error falls with its third power: far fewer reach what rounding leaves


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_landmarks: int,
    key_mask: Tensor | None = None,
    iterations: int = _ITERATIONS,
) -> Tensor:
    """softmax(Q Kl^T) pinv(A) softmax(Ql K^T) V with A = softmax(Ql Kl^T) (Nystromformer, arXiv:2102.03902, section 3).

    Queries and keys are scaled by head_dim^(-1/4). The landmarks Ql and Kl are means of as many segments of a row's
    real tokens, whose sizes differ by one at most; a row with fewer tokens than landmarks has one for each token, and
    then this is softmax attention, as near as the iteration comes to the inverse. The authors' convolution over the
    values is left out, padding enters nothing (in their code it enters the means), and the pseudo-inverse is scaled
    for each matrix (in their code by a maximum over the batch, so that rows change one another).

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, length, value_dim).
        num_landmarks: at least 1.
        key_mask: (batch, length) bool, True for a real token.
        iterations: of the pseudo-inverse, from 1 to 1,000; 6 in the paper.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value, computed in float32 or float64. Rows without a real
        token are zeros.

    Raises:
        ValueError: shapes or devices that disagree, queries not as many as keys, or a number below 1.
        TypeError: a size that is no integer, dtypes that are not floating point or not alike, a mask that is not bool.

    Cost: 2 * length * num_landmarks * (3 head_dim + 2 value_dim) operations a head, and
    iterations * 8 * num_landmarks^3.
    """
    mask = _check(query, key, value, key_mask, num_landmarks)
    with without_autocast(query.device.type):
        dtype, scale = working_dtype(query, key, value), query.shape[3] ** -0.5
        query, key, wide_value = (real_tokens(x.to(dtype), key_mask) for x in (query, key, value))
        means, present = _segment_means(mask, min(num_landmarks, key.shape[2]), dtype)
        query_landmarks = means @ query
        key_landmarks = (means @ key).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        allowed = present[:, None, None, :]
        scores = (query_landmarks @ key_landmarks.mT * scale).masked_fill(~allowed, torch.finfo(dtype).min)
        # A landmark without a token is the identity in A, so that it takes no part in the inverse of the others.
        alone = torch.eye(present.shape[1], dtype=dtype, device=query.device)
        matrix = torch.where(present[:, None, :, None], scores.softmax(-1), alone)
        gathered = masked_attention(query_landmarks, key, wide_value, scale, allowed=mask[:, None, None, :])
        spread = iterative_inverse(matrix, iterations) @ gathered
        return masked_attention(query, key_landmarks, spread, scale, allowed=allowed).to(value.dtype)


def skyformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    samples: Tensor,
    key_mask: Tensor | None = None,
    regularization: float = 0.1,
    iterations: int = _ITERATIONS,
) -> Tensor:
    """kap(Q, S) (kap(S, S) + regularization I)^(-1) kap(S, K) V with kap(x, y) = exp(-|x - y|^2 / 2).

    Skyformer (arXiv:2111.00035, section 4). An approximation of kap(Q, K) V, without normalised rows. Queries and
    keys are scaled by head_dim^(-1/4) (in the authors' code by 32^(-1/4), whatever the head). The landmarks S are
    sampled from a row's real tokens, the first half of them queries, the others keys. With D the diagonal of the row
    sums of kap(S, S) + regularization I to the power -1/2, and M = D (kap(S, S) + regularization I) D, the inverse is
    D M^(-1) D, and M^(-1) comes from `iterative_inverse`.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, length, value_dim).
        samples: (num_landmarks,) int64 in [0, 2^31): landmark s of a row with c real tokens is the one of rank
            samples[s] * c // 2^31 among them. The same for every row and head.
        key_mask: (batch, length) bool, True for a real token.
        regularization: positive; 0.1 in the authors' code.
        iterations: of the inverse, from 1 to 1,000; 6 in the authors' code.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value, computed in float32 or float64. Rows without a real
        token are zeros.

    Raises:
        ValueError: shapes or devices that disagree, queries not as many as keys, or samples that are no such numbers.
        TypeError: a size that is no integer, dtypes that are not floating point or not alike, a mask that is not bool.

    Cost: 2 * length * num_landmarks * (2 head_dim + 2 value_dim) operations a head, and
    iterations * 8 * num_landmarks^3.
    """
    _check_samples(samples)
    mask = _check(query, key, value, key_mask, samples.shape[0])
    with without_autocast(query.device.type):
        dtype, groups = working_dtype(query, key, value), query.shape[1] // key.shape[1]
        query, key, wide_value = (real_tokens(x.to(dtype), key_mask) for x in (query, key, value))
        query, key = query * query.shape[3] ** -0.25, key * key.shape[3] ** -0.25
        chosen = _sampled_tokens(mask, samples)
        half = samples.shape[0] // 2
        from_keys = _take(key, chosen[:, half:]).repeat_interleave(groups, dim=1)
        landmarks = torch.cat([_take(query, chosen[:, :half]), from_keys], 2)
        identity = torch.eye(samples.shape[0], dtype=dtype, device=query.device)
        matrix = _gaussian(landmarks, landmarks) + regularization * identity
        root = matrix.sum(-1, keepdim=True).rsqrt()
        # The landmarks of a key head's query heads stand below one another, so that its keys are not copied.
        stacked = landmarks.unflatten(1, (-1, groups)).flatten(2, 3)
        gathered = (_gaussian(stacked, key) @ wide_value).unflatten(2, (groups, -1)).flatten(1, 2)
        spread = root * (iterative_inverse(root * matrix * root.mT, iterations) @ (root * gathered))
        return (_gaussian(query, landmarks) @ spread).to(value.dtype)


def iterative_inverse(matrix: Tensor, iterations: int = _ITERATIONS) -> Tensor:
    """The pseudo-inverse of (..., m, m) by products alone: Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4.

    It starts at Z = A^T / (|A|_1 |A|_inf) with the norms of each matrix by itself (Nystromformer, section 3.3), and
    the error |I - AZ| falls with its third power once it is small.

    Raises:
        TypeError, ValueError: iterations that are no integer from 1 to 1,000.
    """
    check_at_least_one(iterations=iterations)
    if iterations > _MOST_ITERATIONS:
        raise ValueError(f"iterations must be at most {_MOST_ITERATIONS}, got {iterations}")
    size = matrix.abs()
    scale = size.sum(-1).amax(-1) * size.sum(-2).amax(-1)
    inverse = matrix.mT / scale[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def _segment_means(mask: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(batch, 1, count, length) weights of means over `count` segments of real tokens; (batch, count), not empty."""
    real = mask.sum(1, keepdim=True)
    segment = (mask.cumsum(1) - 1) * count // real.clamp(min=1)
    member = (segment[:, None, :] == torch.arange(count, device=mask.device)[:, None]) & mask[:, None, :]
    sizes = member.sum(-1, keepdim=True)
    return (member.to(dtype) / sizes.clamp(min=1))[:, None], sizes[..., 0] > 0


def _sampled_tokens(mask: Tensor, samples: Tensor) -> Tensor:
    """(batch, num_landmarks) indices of the real tokens whose ranks the samples stand for."""
    rank = samples * mask.sum(1, keepdim=True) // SAMPLE_RANGE
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # real tokens first
    return order.gather(1, rank)


def _gaussian(one: Tensor, other: Tensor) -> Tensor:
    """exp(-|x - y|^2 / 2) for every row of one and of the other."""
    norms = one.square().sum(-1)[..., :, None] + other.square().sum(-1)[..., None, :]
    return (one @ other.mT - norms / 2).clamp(max=0).exp()


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Tokens `index` (batch, count) of (batch, heads, length, width)."""
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))


def _check_samples(samples: Tensor) -> None:
    if samples.dim() != 1 or samples.dtype != torch.int64:
        raise ValueError(f"samples must be (num_landmarks,) int64, got {tuple(samples.shape)} of {samples.dtype}")
    in_memory = samples.is_cpu and len(samples) and not torch.compiler.is_compiling()
    if in_memory and not 0 <= int(samples.min()) <= int(samples.max()) < SAMPLE_RANGE:
        raise ValueError(f"samples must be from 0 to {SAMPLE_RANGE - 1}, got {samples.tolist()[:16]}")


def _check(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, num_landmarks: int) -> Tensor:
    """Refuse what does not fit; the mask of real tokens."""
    check_attention_tensors(query, key, value, key_mask)
    check_at_least_one(num_landmarks=num_landmarks)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"landmarks are taken from queries and keys of the same tokens, got {query.shape[2]} queries and"
            f" {key.shape[2]} keys"
        )
    return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
