"""Hashing by hyperplanes in the Gray-code order of Hamming-sorted LSH, where near vectors get near ranks."""

import torch
from torch import Tensor

MAX_HASH_BITS = 62  # a code is one int64 of either use: bits, and a rank to sort by


def hash_codes(x: Tensor, hyperplanes: Tensor) -> Tensor:
    """The side of each hyperplane that a vector lies on, as one number: the sum over t of [x . h_t > 0] 2^t.

    Two vectors at the angle a share a bit with probability 1 - a / pi over Gaussian hyperplanes. The length of a
    vector does not matter. No gradient. Computed in float32 or better, also under autocast.

    Args:
        x: (..., head_dim), floating point.
        hyperplanes: (head_dim, bits), the normals; the same for queries and keys, and for every head.

    Returns:
        (...) int64 bucket ids from 0 to 2^bits - 1.

    Raises:
        ValueError: widths that disagree, or fewer than 1 or more than 62 bits.
        TypeError: x is not floating point.

    Cost: 2 * bits * head_dim operations a vector.
    """
    if not x.is_floating_point():
        raise TypeError(f"vectors to hash must be floating point, got {x.dtype}")
    check_hyperplanes(hyperplanes, x.shape[-1])
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        sides = x.to(dtype) @ hyperplanes.to(dtype) > 0
        places = torch.ones((), dtype=torch.int64, device=x.device) << torch.arange(sides.shape[-1], device=x.device)
        return (sides * places).sum(-1)


def gray_rank(codes: Tensor) -> Tensor:
    """The place of each bucket in the reflected Gray code, the inverse of r -> r xor (r >> 1).

    Buckets that follow one another differ in one bit, so that sorting by the rank brings vectors together that differ
    by few hyperplanes (HyperAttention, definition 1). The authors' code sorts by the Gray code of the bucket instead
    of by its inverse: there neighbours differ in up to 4 bits of 7.

    Args:
        codes: int64 bucket ids, not negative, as of `hash_codes`.

    Returns:
        int64 ranks, from 0 to 2^bits - 1, of the same shape.
    """
    rank = codes
    for shift in (1, 2, 4, 8, 16, 32):
        rank = rank ^ (rank >> shift)
    return rank


def check_hyperplanes(hyperplanes: Tensor, head_dim: int) -> None:
    """Refuse hyperplanes that are not (head_dim, 1 to 62 bits).

    Raises:
        ValueError: naming the expected and the received shape.
    """
    if hyperplanes.dim() != 2 or hyperplanes.shape[0] != head_dim:
        raise ValueError(
            f"hyperplanes must be (head_dim, bits) with head_dim = {head_dim}, got {tuple(hyperplanes.shape)}"
        )
    if not 1 <= hyperplanes.shape[1] <= MAX_HASH_BITS:
        raise ValueError(f"hyperplanes must be 1 to {MAX_HASH_BITS}, got {hyperplanes.shape[1]}")
