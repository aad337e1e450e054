"""Gradients of the low-rank sketch: of its inputs, of its factors.

With L_tj = x Theta_tj made again and the gradient g of the features, that of a map is g times its term's other maps:

    dL_tj = g prod_{i != j} L_ti        dx = sum_tj dL_tj Theta_tj^T        dTheta_tj = x^T dL_tj

The others' product is that of the maps before j, which is carried along, and of the maps after it: nothing is divided,
so that maps of zero are maps like any other. All maps of a term are in registers at once, for narrow tiles of features.
"""

import triton
import triton.language as tl

from polysketch.ops.low_rank_sketch.triton.programs.features import load_factor
from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def low_rank_sketch_inputs_backward(
    x,
    factors,
    grad,
    grad_x,
    x_batch, x_head, x_token,
    length,
    rows,
    tiles,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one map, all of its features, BLOCK at a time.

    grad (batch, HEADS, length, FEATURES), of the features; grad_x (batch, HEADS, length, INPUTS); both contiguous. The
    others as of `low_rank_sketch`.
    """
    number = tl.program_id(0)
    tile = number % tiles
    owner = number // tiles
    of_row, place, seen = row_places(tile, owner, rows, length, x_batch, x_head, x_token, HEADS, MAPS, TOKENS)
    lanes = tl.arange(0, LANES)
    taken = load_rows(x, of_row, 1, lanes, seen, INPUTS).to(DOT)
    of_map = factors + tl.cast(owner, tl.int64) * (RANK * DEGREE * INPUTS * FEATURES)

    found = tl.zeros((TOKENS, LANES), tl.float32)
    for start in range(0, FEATURES, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        upstream = load_rows(grad, place, FEATURES, columns, seen, FEATURES).to(tl.float32)
        for term in range(RANK):
            thetas = load_term(of_map, term, columns, INPUTS, FEATURES, DEGREE, DOT, LANES)
            maps = maps_of(taken, thetas, PRECISION)
            before = upstream
            for factor in tl.static_range(DEGREE):
                changes = times_after(before, maps, factor).to(DOT)
                found = tl.dot(changes, tl.trans(thetas[factor]), found, input_precision=PRECISION)
                before = before * maps[factor]
    store_rows(grad_x, found, place, lanes, seen, INPUTS)


@triton.jit(do_not_specialize=["length", "rows", "tiles", "tiles_per_span", "spans"])
def low_rank_sketch_factors_backward(
    x,
    factors,
    grad,
    sums,
    x_batch, x_head, x_token,
    length,
    rows,
    tiles,
    tiles_per_span,
    spans,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK features of one term of one map, one span of the tiles of its rows.

    Its factors are read once and stay in shared memory; their gradients stay in registers, and are written at the end
    of the span: sums (spans, MAPS, RANK, DEGREE, INPUTS, FEATURES), float32. Arguments as of the program above.
    """
    SLICES: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    columns = (number % SLICES) * BLOCK + tl.arange(0, BLOCK)
    term = (number // SLICES) % RANK
    span = (number // SLICES // RANK) % spans
    owner = number // SLICES // RANK // spans
    lanes = tl.arange(0, LANES)
    of_map = factors + tl.cast(owner, tl.int64) * (RANK * DEGREE * INPUTS * FEATURES)
    thetas = load_term(of_map, term, columns, INPUTS, FEATURES, DEGREE, DOT, LANES)

    found = zeros_of_term(DEGREE, LANES, BLOCK)
    for tile in range(span * tiles_per_span, tl.minimum((span + 1) * tiles_per_span, tiles)):
        of_row, place, seen = row_places(tile, owner, rows, length, x_batch, x_head, x_token, HEADS, MAPS, TOKENS)
        taken = load_rows(x, of_row, 1, lanes, seen, INPUTS).to(DOT)
        # Rows past the end have no gradient, and add nothing.
        before = load_rows(grad, place, FEATURES, columns, seen, FEATURES).to(tl.float32)
        found = add_changes(found, taken, before, maps_of(taken, thetas, PRECISION), DOT, PRECISION)

    of_term = (tl.cast(span, tl.int64) * MAPS + owner) * RANK + term
    for factor in tl.static_range(DEGREE):
        of_factor = sums + (of_term * DEGREE + factor) * (INPUTS * FEATURES)
        store_rows(of_factor, found[factor], lanes, columns, lanes < INPUTS, FEATURES)


@triton.jit
def load_term(
    of_map, term, columns,
    INPUTS: tl.constexpr, FEATURES: tl.constexpr, DEGREE: tl.constexpr, DOT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The factors of a term, each (LANES, columns)."""
    thetas = ()
    for factor in tl.static_range(DEGREE):
        theta = load_factor(of_map, term * DEGREE + factor, columns, INPUTS, FEATURES, LANES).to(DOT)
        thetas = thetas + (theta,)  # type: ignore[assignment]  # noqa: RUF005 - Triton unpacks no tuples into tuples
    return thetas


@triton.jit
def maps_of(taken, thetas, PRECISION: tl.constexpr):
    """The linear maps by the factors of a term, float32."""
    maps = ()
    for factor in tl.static_range(len(thetas)):
        maps = maps + (tl.dot(taken, thetas[factor], input_precision=PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
    return maps


@triton.jit
def times_after(before, maps, FACTOR: tl.constexpr):
    """`before` times all maps after this one."""
    changes = before
    for after in tl.static_range(FACTOR + 1, len(maps)):
        changes = changes * maps[after]
    return changes


@triton.jit
def zeros_of_term(DEGREE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Sums for the gradients of a term's factors."""
    sums = ()
    for _factor in tl.static_range(DEGREE):
        sums = sums + (tl.zeros((LANES, BLOCK), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def add_changes(sums, taken, before, maps, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The sums with x^T dL of every map of a term added, given the gradient of the term's product."""
    added = ()
    for factor in tl.static_range(len(maps)):
        changes = times_after(before, maps, factor).to(DOT)
        total = tl.dot(tl.trans(taken), changes, sums[factor], input_precision=PRECISION)
        added = added + (total,)  # type: ignore[assignment]  # noqa: RUF005
        before = before * maps[factor]
    return added
