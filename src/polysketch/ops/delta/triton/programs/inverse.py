"""The systems of equations inside the chunks, inverted; every chunk on its own.

    T = (I + N)^-1,   N = tril(w diag(s), -1)

Row after row by substitution, in float32. Or, where products are made of TF32, by tensor cores: blocks on the diagonal
are joined in pairs, from single tokens to the whole chunk. Where D holds the inverses of the blocks, and L what
of N joins a pair, the inverse of the pairs is D - D L D. Three products of TF32 make one here, nearly as good as one of
float32, for what is subtracted may cancel.
"""

import triton
import triton.language as tl

from polysketch.ops.linear.triton.programs.outputs import scores


@triton.constexpr_function
def levels_of(chunk):
    """How often pairs are joined until they are the chunk."""
    return chunk.bit_length() - 1


@triton.jit
def within_pairs(strict, level, CHUNK: tl.constexpr):
    """Of a strictly lower (CHUNK, CHUNK) what joins two neighbouring blocks of 2^level tokens; zeros elsewhere."""
    places = tl.arange(0, CHUNK)
    row, column = places[:, None] >> level, places[None, :] >> level
    return tl.where((row >> 1 == column >> 1) & (row != column), strict, 0.0)


@triton.jit
def substituted(strict, CHUNK: tl.constexpr):
    """(I + N)^-1 of a strictly lower N."""
    places = tl.arange(0, CHUNK)
    # T - I: each row is that of -N, times the rows before it.
    found = -strict
    for place in range(1, CHUNK):
        here = places[:, None] == place
        line = tl.sum(tl.where(here, found, 0.0), 0)
        line += tl.sum(line[:, None] * found, 0)
        found = tl.where(here, line[None, :], found)
    return found + tl.where(places[:, None] == places[None, :], 1.0, 0.0)


@triton.jit
def joined(strict, CHUNK: tl.constexpr):
    """The same by products."""
    places = tl.arange(0, CHUNK)
    found = tl.where(places[:, None] == places[None, :], 1.0, 0.0) - within_pairs(strict, 0, CHUNK)
    for level in range(1, levels_of(CHUNK)):
        rest = tl.dot(within_pairs(strict, level, CHUNK), found, input_precision="tf32x3")
        found -= tl.dot(found, rest, input_precision="tf32x3")
    return found


@triton.jit(do_not_specialize=["length", "chunks"])
def delta_inverse(
    key, strength, inverse,
    key_batch, key_head, key_token,
    strength_batch, strength_head, strength_token,
    length, chunks,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK tokens of one head, DEPTH features at a time; by joining blocks, or by substitution.

    Shapes: key (batch, HEADS, length, FEATURES), strength (batch, HEADS, length), inverse (batch, HEADS, chunks, CHUNK,
    CHUNK), contiguous. What is past the last token writes nothing: its rows and columns are those of the identity.
    """
    PART: tl.constexpr = FEATURES // FACTORS
    number = tl.program_id(0)
    row = (number // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    first = (number % chunks).to(tl.int64) * CHUNK
    places = tl.arange(0, CHUNK)
    seen = places < length - first
    key += batch * key_batch + head * key_head + first * key_token
    strength += batch * strength_batch + head * strength_head + first * strength_token
    weight = scores(
        key, key, places, key_token, places, key_token, seen, seen, PART, PRECISION, tl.float32, CHUNK, CHUNK, DEPTH
    )
    if FACTORS == 2:
        weight *= scores(
            key + PART, key + PART, places, key_token, places, key_token, seen, seen, PART, PRECISION, tl.float32,
            CHUNK, CHUNK, DEPTH,
        )  # fmt: skip
    share = tl.load(strength + places * strength_token, mask=seen, other=0.0)
    strict = tl.where(places[:, None] > places[None, :], weight * share[None, :], 0.0)
    found = joined(strict, CHUNK) if JOINED else substituted(strict, CHUNK)
    tl.store(inverse + number.to(tl.int64) * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :], found)
