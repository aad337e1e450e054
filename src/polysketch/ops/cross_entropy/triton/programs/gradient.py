"""The gradient of cross-entropy by logits x and bias b, from m and 1 / (divisor sum) of each row (`forward`).

dx_v = exp(x_v + b_v - m) / (divisor sum) - [v = t] / divisor
db_v = sum over rows of dx_v, before it is rounded
"""

import triton
import triton.language as tl

from polysketch.ops.cross_entropy.triton.programs.forward import IGNORED, columns_from, load_logits, share_of


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["targets"])
def cross_entropy_gradient(
    logits,
    bias,
    targets,
    divisor,
    largest,
    scales,
    gradient,
    sums,
    rows,
    VOCABULARY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of ROWS rows, one after the other, and the sum of these rows.

    logits and gradient (rows, VOCABULARY) and sums (programs of a column, VOCABULARY) are contiguous.
    """
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    part = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = part * ROWS
    columns = columns_from(tl.program_id(0) % BLOCKS * BLOCK, VOCABULARY, BLOCK)
    seen = columns < VOCABULARY
    offset = tl.load(bias + columns, mask=seen, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(tl.minimum(ROWS, rows - first)):
        row = first + number
        target = tl.load(targets + row)
        x = load_logits(logits + row * VOCABULARY, columns, target != IGNORED, VOCABULARY) + offset
        found = tl.exp(x - tl.load(largest + row)) * tl.load(scales + row)
        found -= tl.where(columns == target, share_of(target, divisor, VOCABULARY), 0.0)
        tl.store(gradient + row * VOCABULARY + columns, found.to(gradient.dtype.element_ty), seen)
        total += found
    tl.store(sums + part * VOCABULARY + columns, total, seen)
