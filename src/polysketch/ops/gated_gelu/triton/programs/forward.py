"""The middle of a gated linear unit: gelu(gate) * up, gelu in its tanh form.

0.5 x (1 + tanh(z / 2)) = x sigmoid(z), z = x (LINEAR + CUBIC x^2), LINEAR = sqrt(8 / pi), CUBIC = 0.044715 LINEAR.

Memory decides how long this takes: both halves of a row are read once, and the result is written.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import load_rows, store_rows

LINEAR = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481627260025)


@triton.jit(do_not_specialize=["rows"])
def gated_gelu(
    joined,
    output,
    stride,
    rows,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: TOKENS rows and BLOCK columns of either half.

    joined (rows, 2 * WIDTH) has a row's stride, and output (rows, WIDTH) is contiguous.
    """
    row, columns, seen = place(rows, WIDTH, TOKENS, BLOCK)
    gate, up = load_halves(joined, row, stride, columns, seen, WIDTH)
    share, _ = sigmoid(gate)
    store_rows(output, gate * share * up, row, columns, seen, WIDTH)


@triton.jit
def place(rows, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of this program, int64, its columns, and which rows exist: programs of the same rows follow one another."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    row = number // BLOCKS * TOKENS + tl.arange(0, TOKENS)
    return row.to(tl.int64), number % BLOCKS * BLOCK + tl.arange(0, BLOCK), row < rows


@triton.jit
def load_halves(joined, row, stride, columns, seen, WIDTH: tl.constexpr):
    """Gate and up, float32; zero past the ends."""
    gate = load_rows(joined, row, stride, columns, seen, WIDTH)
    up = load_rows(joined + WIDTH, row, stride, columns, seen, WIDTH)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def sigmoid(gate):
    """sigmoid(z) of gelu, and sigmoid(z) (1 - sigmoid(z)); nothing overflows nor cancels at either end."""
    z = gate * (LINEAR + CUBIC * (gate * gate))
    decayed = tl.exp(-tl.abs(z))
    inverse = 1 / (1 + decayed)
    return tl.where(z < 0, decayed, 1.0) * inverse, decayed * inverse * inverse
