"""The systems of equations inside the chunks, inverted; every chunk on its own.

    T = (I + tril(w diag(s), -1))^-1

Row after row by substitution, in float32 whatever products are made of: what is subtracted may cancel.
"""

import triton
import triton.language as tl

from polysketch.ops.linear.triton.programs.outputs import scores


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
):  # fmt: skip
    """One program: CHUNK tokens of one head, DEPTH features at a time.

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
    # T - I: each row is that of -w diag(s), times the rows before it.
    found = tl.where(places[:, None] > places[None, :], -weight * share[None, :], 0.0)
    for place in range(1, CHUNK):
        here = places[:, None] == place
        line = tl.sum(tl.where(here, found, 0.0), 0)
        line += tl.sum(line[:, None] * found, 0)
        found = tl.where(here, line[None, :], found)
    found += tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    tl.store(inverse + number.to(tl.int64) * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :], found)
