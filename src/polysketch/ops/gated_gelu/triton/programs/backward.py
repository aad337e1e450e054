"""The gradient of gelu(gate) * up, both halves side by side.

With s = sigmoid(z) of gelu (`forward`), u the gradient of the result:

    dgate = u up (s + gate s (1 - s) z'),  z' = LINEAR + 3 CUBIC gate^2
    dup = u gate s
"""

import triton
import triton.language as tl

from polysketch.ops.gated_gelu.triton.programs.forward import CUBIC, LINEAR, load_halves, place, sigmoid
from polysketch.ops.triton.programs.shared import load_rows


@triton.jit(do_not_specialize=["rows"])
def gated_gelu_backward(
    joined,
    gradient,
    grad_joined,
    stride,
    rows,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: TOKENS rows and BLOCK columns of either half.

    joined (rows, 2 * WIDTH) has a row's stride; gradient (rows, WIDTH) and grad_joined, as joined, are contiguous.
    """
    row, columns, seen = place(rows, WIDTH, TOKENS, BLOCK)
    gate, up = load_halves(joined, row, stride, columns, seen, WIDTH)
    upstream = load_rows(gradient, row, WIDTH, columns, seen, WIDTH).to(tl.float32)
    share, steep = sigmoid(gate)
    slope = share + gate * steep * inner_slope(gate)
    store_halves(grad_joined, upstream * up * slope, upstream * gate * share, row, columns, seen, WIDTH)


@triton.jit
def inner_slope(gate):
    """z'."""
    return LINEAR + 3 * CUBIC * (gate * gate)


@triton.jit
def store_halves(joined, of_gate, of_up, row, columns, seen, WIDTH: tl.constexpr):
    """Write both halves of rows in their tensor's dtype."""
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    places = joined + row[:, None] * (2 * WIDTH) + columns[None, :]
    tl.store(places, of_gate.to(joined.dtype.element_ty), mask)
    tl.store(places + WIDTH, of_up.to(joined.dtype.element_ty), mask)
