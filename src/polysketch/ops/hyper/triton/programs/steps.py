"""What the programs of HyperAttention share: a running softmax, its gradients, who asks and who is seen in a tile."""

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # the score of a key that is not seen
LOWEST = tl.constexpr(-1e29)  # the largest score of a query that has seen none: above hidden ones


@triton.jit
def see(scores, values, highest, mass, numerator, PRECISION: tl.constexpr, DOT: tl.constexpr):
    """(largest score, sum of weights, sum of weighted values) of rows that have seen more keys.

    Weights are relative to the largest score, so none is above 1 and float16 inputs leave no range. What is there
    already is made relative to the new one.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    carried = tl.exp(highest - higher)
    mass = mass * carried + tl.sum(weights, 1)
    numerator = tl.dot(weights.to(DOT), values.to(DOT), numerator * carried[:, None], input_precision=PRECISION)
    return higher, mass, numerator


@triton.jit
def mean_of(numerator, mass):
    """Mean values; zeros of a row that has seen no key."""
    none = mass == 0.0
    return numerator * tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, mass))[:, None]


@triton.jit
def changes_of(scores, grad_weights, peaks, shares, means):
    """(shares of the mass, gradients of scores) from scores, largest scores, 1 / masses and grad_output . output."""
    weights = tl.exp(scores - peaks) * shares
    return weights, weights * (grad_weights - means)


@triton.jit
def asked_for(query_places, block, rows, ROWS: tl.constexpr):
    """(places of a block of a tile's queries, whether there is one): an empty slot has the place 0."""
    slots = block * ROWS + tl.arange(0, ROWS)
    places = tl.load(query_places + slots, mask=slots < rows, other=-1)
    return tl.maximum(places, 0), places >= 0


@triton.jit
def seen_keys(key_places, log_weights, start, keys, KEYS: tl.constexpr):
    """(tokens, what is added to their scores, whether they are seen) of a block of a tile's keys."""
    columns = start + tl.arange(0, KEYS)
    tokens = tl.load(key_places + columns, mask=columns < keys, other=0).to(tl.int64)
    added, seen = added_to_scores(log_weights, columns, columns < keys)
    return tokens, added, seen


@triton.jit
def added_to_scores(log_weights, columns, inside):
    """(what is added to the scores of a tile's keys, whether they are seen)."""
    added = tl.load(log_weights + columns, mask=inside, other=float("-inf"))
    seen = added > float("-inf")
    return tl.where(seen, added, HIDDEN), seen
