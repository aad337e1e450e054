"""The definition of `hyper_attention`: quadratic, plain PyTorch, a head of a row at a time; the oracle of the tests.

Only random numbers and hashes are those of the op's own files. Weights are what exp gives: scores must be moderate.
"""

import math

import torch
from torch import Tensor

from polysketch.ops.hyper.samples import random_bits, random_uniform
from polysketch.ops.hyper.sort_lsh import gray_rank, hash_codes


def hyper_attention(
    query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None, seed: int = 0, **options
) -> Tensor:
    """Arguments as of the op, except that all sizes and hyperplanes must be given; zeros before a first real token."""
    groups, heavy = query.shape[1] // key.shape[1], options.pop("heavy_mask", None)
    real = torch.ones(key.shape[::2], dtype=torch.bool) if key_mask is None else key_mask
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    for b, h in [(b, h) for b in range(query.shape[0]) for h in range(query.shape[1])]:
        first = int(real[b].to(torch.uint8).argmax())
        own = slice(first if query.shape[2] == key.shape[2] else 0, None)
        named = None if heavy is None else heavy[b % len(heavy), h % heavy.shape[1]]
        tensors = (query[b, h, own], key[b, h // groups, first:], value[b, h // groups, first:], real[b, first:])
        output[b, h, own] = _attend(*tensors, heavy=named, head=h // groups, seed=seed, **options)
    return output


def _attend(query, key, value, real, *, causal, min_length, scale=None, **options) -> Tensor:
    """(n, head_dim), (m, head_dim), (m, value_dim), (m) -> (n, value_dim)."""
    weights = (query @ key.mT * (query.shape[1] ** -0.5 if scale is None else scale)).exp() * real
    number, length = torch.arange(len(query)), len(key)
    exact = torch.ones_like(weights)
    if causal:
        exact = (number[:, None] // min_length == number // min_length).to(weights.dtype).tril()
    numerator, denominator = (weights * exact) @ value, (weights * exact).sum(1)
    halves = [min_length * 2**i for i in range(length) if min_length * 2**i < length] if causal else []
    spans = [
        (slice(start + half, start + 2 * half), slice(start, start + half))
        for half in halves
        for start in range(0, length - half, 2 * half)
    ]
    if not causal and real.sum() > min_length:
        numerator, denominator, spans = 0 * numerator, 0 * denominator, [(slice(0, len(query)), slice(0, length))]
    for rows, seen in spans:
        later = real[rows] if causal else None
        parts = (query[rows], key[seen], value[seen], real[seen], weights[rows, seen], seen.start, rows, seen, later)
        products, sums = _estimates(*parts, **options)
        numerator = torch.cat([numerator[: rows.start], numerator[rows] + products, numerator[rows.stop :]])
        denominator = torch.cat([denominator[: rows.start], denominator[rows] + sums, denominator[rows.stop :]])
    return torch.where(denominator > 0, 1 / denominator.clamp(min=1e-300), 0.0)[:, None] * numerator


def _estimates(
    query, key, value, real, weights, start, rows, seen, later,
    *, hyperplanes, chunk_size, sample_size, sampling, head, seed, heavy=None, capping=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What queries get of keys that they may all see: sums of weighted values, and of weights."""
    if heavy is None:
        exact = _same_chunk(query, key, real, hyperplanes, chunk_size, by_rank=later is None and len(query) == len(key))
    else:
        exact = heavy.repeat_interleave(chunk_size, 0).repeat_interleave(chunk_size, 1)[rows, seen]
        exact = exact[: len(query), : len(key)] & real
    drawn = _drawn(start, real, sample_size, head, seed) & ~exact
    outside = (real & ~exact).sum(1)
    counts = drawn * (outside.to(weights.dtype) / drawn.sum(1).clamp(min=1))[:, None]
    products = counts
    if sampling == "norm":
        products = _counts_by_norm(value.detach(), real, start, sample_size, head, seed) * ~exact
    numerator = (weights * (exact + products)) @ value
    sums = (weights * exact).sum(1)
    if capping is None:
        return numerator, sums + (weights * counts).sum(1)
    epsilon, kappa = capping  # algorithm 2, line by line
    n, m = max(int(real.sum()), 2), min(max(int(real.sum()), 2), sample_size)
    rest = (weights * (real & ~exact)).sum(1).detach()
    floor = _largest_rest(rest, start, real, later, sample_size, head, seed) / kappa
    caps = epsilon**2 * m / (n * math.log(n)) * (sums + floor)
    estimate = (counts * weights.minimum(caps[:, None])).sum(1)
    return numerator, sums + torch.where(outside > 0, estimate.maximum(floor), 0.0)


def _same_chunk(query, key, real, hyperplanes, chunk_size, by_rank) -> Tensor:
    """(n, m) bool: where queries and real keys are in the same chunk of the keys' order (algorithm 1)."""
    last = 2 ** hyperplanes.shape[1]
    of_key, of_query = (gray_rank(hash_codes(x, hyperplanes)) for x in (key, query))
    of_key = of_key.masked_fill(~real, last)
    place = of_key.argsort(stable=True).argsort()
    if by_rank:
        target = of_query.masked_fill(~real, last).argsort(stable=True).argsort()
    else:
        before = (of_key < of_query[:, None]).sum(1) + (of_key <= of_query[:, None]).sum(1)
        target = (before // 2).clamp(max=max(int(real.sum()) - 1, 0))
    return (target[:, None] // chunk_size == place // chunk_size) & real


def _drawn(start, real, size, head, seed) -> Tensor:
    """(m) bool: the `size` real tokens with the smallest random numbers."""
    position = start + torch.arange(len(real))
    number = (random_bits(seed, torch.tensor(head), position) << 31) | position
    number = number.masked_fill(~real, torch.iinfo(torch.int64).max)
    return real & (number.argsort().argsort() < size)


def _counts_by_norm(value, real, start, size, head, seed) -> Tensor:
    """(m): how often a key is drawn times 1 / (size P), P proportional to |v|^2 (Lemma 2); 1 where all are drawn."""
    if real.sum() <= size:
        return real.to(value.dtype)
    mass = value.square().sum(1) * real
    points = random_uniform(seed, torch.tensor(head), torch.tensor(start), torch.arange(size)) * mass.sum()
    index = torch.searchsorted(mass.cumsum(0), points, right=True).clamp(max=len(mass) - 1)
    times = index.bincount(minlength=len(mass))
    return torch.where(mass > 0, times * mass.sum() / (size * mass), 0.0)


def _largest_rest(rest, start, real, later, size, head, seed) -> Tensor:
    """(n): tau, the largest of drawn queries' exact sums outside of S_i; of those so far where `later` is given."""
    if later is None:
        asked = real if len(rest) == len(real) else torch.ones(len(rest), dtype=torch.bool)
        return rest[_drawn(0, asked, size, head, seed + 1)].max().expand(len(rest))
    drawn = _drawn(start + len(real), torch.ones(len(real), dtype=torch.bool), size, head, seed + 1)[: len(rest)]
    drawn[later.to(torch.uint8).argmax()] = True
    return (rest * (drawn & later)).cummax(0).values
