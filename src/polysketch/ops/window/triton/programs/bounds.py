"""Which keys a query sees, and what is there of them, for every program of a window."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(1e30)  # the logarithm of the mass of a query that sees nothing: its weights are zero


@triton.jit
def seen_of(rows, earlier, behind, ahead, block, BLOCKS: tl.constexpr):
    """(first, last) key that each query sees, which may lie outside of those that there are."""
    place = rows + earlier
    last = place + ahead
    if BLOCKS:
        last = tl.minimum(last, earlier + (rows // block + 1) * block - 1)
    return place - behind, last


@triton.jit
def real_keys(key_mask, start, end, KEYS: tl.constexpr):
    """(keys from `start` on, whether they are real ones before `end`)."""
    tokens = start + tl.arange(0, KEYS)
    real = tokens < end
    if key_mask is not None:
        real = real & (tl.load(key_mask + tokens, mask=real, other=0) != 0)
    return tokens, real
