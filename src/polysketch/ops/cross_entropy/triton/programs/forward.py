"""Cross-entropy of rows of logits x + b, and what their gradient needs of a whole row.

    loss = m - x_t - b_t + log(sum),  sum = sum_v exp(x_v + b_v - m)

m is the largest x_v + b_v, found on the way: a row is read once.
"""

import triton
import triton.language as tl

IGNORED = tl.constexpr(-100)  # polysketch.targets.NO_TARGET
LOWEST = tl.constexpr(
    -3.4028234663852886e38
)  # of float32: a row may begin with -inf, which has no difference to itself


@triton.jit(do_not_specialize_on_alignment=["targets"])  # those of a chunk begin anywhere
def cross_entropy(
    logits,
    bias,
    targets,
    divisor,
    losses,
    largest,
    scales,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row. logits (rows, VOCABULARY) are contiguous.

    Beside the loss m and 1 / (divisor sum) are written: 0 and 0 of a row without a target.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    target = tl.load(targets + row)
    wanted = target != IGNORED
    highest, total = sum_of_exponentials(logits, bias, wanted, VOCABULARY, BLOCK)
    loss = highest - logit_of(logits, bias, target, VOCABULARY) + tl.log(total)
    tl.store(losses + row, tl.where(wanted, loss, 0.0))
    tl.store(largest + row, highest)
    tl.store(scales + row, share_of(target, divisor, VOCABULARY) / total)


@triton.jit
def sum_of_exponentials(logits, bias, wanted, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """m and the sum; 0 and 1 of a row that is not wanted."""
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        x = biased(logits, bias, columns_from(start, VOCABULARY, BLOCK), wanted, VOCABULARY)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    return tl.where(wanted, highest, 0.0), tl.where(wanted, total, 1.0)


@triton.jit
def columns_from(start, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The next columns of a row.

    Where rows do not begin at words of sixteen bytes, the compiler must not give a thread four numbers side by side: it
    would read them one by one, each instruction a quarter of the sectors that it touches.
    """
    columns = start + tl.arange(0, BLOCK)
    return columns if VOCABULARY % 4 == 0 else tl.max_contiguous(columns, 1)


@triton.jit
def biased(logits, bias, columns, wanted, VOCABULARY: tl.constexpr):
    """Logits of a row with their bias; -inf past the end, and everywhere in a row that is not wanted.

    Logits are kept out of the cache beside a multiprocessor, where the bias stays for the next rows.
    """
    x = load_logits(logits, columns, wanted, VOCABULARY)
    return x + tl.load(bias + columns, mask=(columns < VOCABULARY) & wanted, other=0.0).to(tl.float32)


@triton.jit
def load_logits(logits, columns, wanted, VOCABULARY: tl.constexpr):
    """Of a row; -inf past its end, and everywhere where it is not wanted."""
    seen = (columns < VOCABULARY) & wanted
    return tl.load(logits + columns, mask=seen, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def logit_of(logits, bias, target, VOCABULARY: tl.constexpr):
    """x_t + b_t; NaN for a target outside the vocabulary, where nothing is read."""
    inside = (target >= 0) & (target < VOCABULARY)
    x = tl.load(logits + target, mask=inside, other=float("nan"))
    return x + tl.load(bias + target, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def share_of(target, divisor, VOCABULARY: tl.constexpr):
    """1 / divisor; 0 without a target, and NaN for one outside the vocabulary."""
    inside = (target >= 0) & (target < VOCABULARY)
    return tl.where(inside, 1 / tl.load(divisor), tl.where(target == IGNORED, 0.0, float("nan")))
