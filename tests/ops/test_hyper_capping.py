"""HyperAttention's bounds of the denominator (algorithm 2): its listing, what they keep off, and what they leave be."""

import math

import pytest
import torch
from torch import Tensor

from ops.test_hyper import TOLERANCE, hyper, operator_norm_ratio, tensors
from polysketch import ops
from polysketch.ops.hyper.capping import draw_rows
from polysketch.ops.hyper.samples import draw_uniform

CHUNK = 8


def given_mask(length: int, heads: int = 2, seed: int = 5) -> Tensor:
    """(1, heads, chunks, chunks), about a third of the chunks."""
    chunks = -(-length // CHUNK)
    return torch.rand(1, heads, chunks, chunks, generator=torch.Generator().manual_seed(seed)) < 0.35


def entries(mask: Tensor, length: int) -> Tensor:
    """(heads, length, length), the pairs of tokens that a mask of chunks names."""
    return mask[0].repeat_interleave(CHUNK, 1).repeat_interleave(CHUNK, 2)[:, :length, :length]


def listing(
    weights: Tensor, value: Tensor, heavy: Tensor, sample: Tensor, tau: Tensor, epsilon: float, kappa: float
) -> tuple[Tensor, Tensor]:
    """Numerators and denominators by algorithm 2 as it stands, for uniform samples.

    Args:
        weights: (heads, rows, n), exp of the scores.
        value: (n, value_dim).
        heavy: (heads, rows, n) bool.
        sample: (m) int64.
        tau: (heads, rows or 1).
    """
    outside, n = (~heavy)[..., sample], len(value)
    exact = (weights * heavy).sum(-1)
    cap = epsilon**2 * len(sample) / (n * math.log(n)) * (exact + tau / kappa)
    count = (~heavy).sum(-1).double() / outside.sum(-1).clamp(min=1)
    estimate = (count[..., None] * outside * weights[..., sample].minimum(cap[..., None])).sum(-1)
    denominator = exact + torch.where((~heavy).any(-1), estimate.maximum(tau / kappa), 0.0)
    drawn = weights[..., sample] * outside * count[..., None]
    return (weights * heavy) @ value + drawn @ value[sample], denominator


def exponentials(inputs: list[Tensor]) -> Tensor:
    """(heads, n, n)."""
    return (inputs[0] @ inputs[1].mT * inputs[0].shape[3] ** -0.5).exp()[0]


def drawn(inputs: list[Tensor], size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The keys and the queries that the op draws."""
    real, start = torch.ones(1, 1, inputs[1].shape[2], dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    keys = draw_uniform(inputs[2][:, :, None], real, start, size, seed).key.flatten()
    return keys, draw_rows(inputs[0][:, None, None], real, start, size, seed).query.flatten()


@pytest.mark.parametrize("size", [6, 16, 45])
@pytest.mark.parametrize(("epsilon", "kappa"), [(0.3, 2.0), (2.0, 1.0), (3.0, 50.0)])
def test_output_and_gradients_are_those_of_algorithm_2(epsilon, kappa, size):
    inputs, mask = [x.requires_grad_() for x in tensors(45)], given_mask(45)
    heavy, (sample, rows) = entries(mask, 45), drawn(inputs, size, 3)
    weights = exponentials(inputs)
    tau = (weights * ~heavy).sum(-1)[:, rows].amax(-1, keepdim=True).detach()
    numerator, denominator = listing(weights, inputs[2][0, 0], heavy, sample, tau, epsilon, kappa)
    expected = (numerator / denominator[..., None])[None]
    output = hyper(inputs, heavy_mask=mask, sample_size=size, seed=3, capping=(epsilon, kappa))
    torch.testing.assert_close(output, expected, **TOLERANCE)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (output, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize(("epsilon", "kappa"), [(0.3, 2.0), (2.0, 1.0)])
def test_causal_attention_bounds_each_span_with_tau_of_the_queries_so_far(epsilon, kappa):
    """All keys and queries drawn; blocks of 8 of 45 tokens."""
    inputs, mask = tensors(45), given_mask(45)
    heavy, weights, value = entries(mask, 45), exponentials(inputs), inputs[2][0, 0]
    own = torch.arange(45)[:, None] // 8 == torch.arange(45) // 8
    exact = weights * own.tril()
    numerator, denominator = exact @ value, exact.sum(-1)
    for half, rows in ((8, (8, 16)), (8, (24, 32)), (8, (40, 45)), (16, (16, 32)), (32, (32, 45))):
        queries, keys = slice(*rows), slice(rows[0] - half, rows[0])
        part, named = weights[:, queries, keys], heavy[:, queries, keys]
        tau = (part * ~named).sum(-1).cummax(-1).values
        more, sums = listing(part, value[keys], named, torch.arange(half), tau, epsilon, kappa)
        numerator[:, queries] += more
        denominator[:, queries] += sums
    output = hyper(inputs, causal=True, heavy_mask=mask, sample_size=32, capping=(epsilon, kappa))
    torch.testing.assert_close(output[0], numerator / denominator[..., None], **TOLERANCE)


def test_bounds_that_do_not_bind_change_nothing():
    inputs, mask = tensors(64), given_mask(64)
    for options in ({}, {"causal": True}, {"heavy_mask": mask}, {"sampling": "norm"}):
        expected = hyper(inputs, **options)
        torch.testing.assert_close(hyper(inputs, capping=(1e6, 1e9), **options), expected, **TOLERANCE)
        assert not torch.allclose(hyper(inputs, capping=(0.5, 1.5), **options), expected)


def test_an_epsilon_of_a_half_caps_ordinary_weights_and_three_does_not():
    """Errors in operator norms, over 4 inputs and draws: 0.36 without bounds and with (3, 4), 0.71 with (0.5, 4)."""

    def error(capping: tuple[float, float] | None) -> float:
        total = 0.0
        for seed in range(4):
            inputs, generator = tensors(512, heads=1, seed=seed), torch.Generator().manual_seed(100 + seed)
            options = {"hyperplanes": torch.randn(8, 7, generator=generator, dtype=torch.float64), "seed": seed}
            output = hyper(inputs, min_length=32, chunk_size=32, sample_size=32, capping=capping, **options)
            total += operator_norm_ratio(inputs, output)
        return total

    assert 0.95 < error((3.0, 4.0)) / error(None) < 1.05
    assert error((0.5, 4.0)) > 1.7 * error(None)


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_of_all_keys_is_exact_with_any_bounds(causal):
    inputs = tensors(60, heads=4, key_heads=2)
    exact = ops.softmax_attention(*inputs, causal=causal)
    output = hyper(inputs, causal=causal, chunk_size=60, capping=(1e-3, 1.0))
    torch.testing.assert_close(output, exact, **TOLERANCE)


@pytest.mark.parametrize("sampling", ["uniform", "norm"])
def test_with_bounds_too_later_tokens_move_no_earlier_row(sampling):
    inputs, others = tensors(200, heads=4, key_heads=2), tensors(200, heads=4, key_heads=2, seed=1)
    others[0] = 3 * others[0]  # rows that would raise tau
    options = {"causal": True, "sampling": sampling, "capping": (0.5, 1.5), "sample_size": 5}
    before = hyper(inputs, **options)
    for start in (9, 13, 16, 33, 100, 128, 150, 199):
        mixed = [torch.cat([x[:, :, :start], y[:, :, start:]], 2) for x, y in zip(inputs, others, strict=True)]
        torch.testing.assert_close(hyper(mixed, **options)[:, :, :start], before[:, :, :start])
        shorter = [x[:, :, :start] for x in inputs]
        torch.testing.assert_close(hyper(shorter, **options), before[:, :, :start])


@pytest.mark.parametrize("causal", [False, True])
def test_with_bounds_too_padding_counts_for_nothing(causal):
    inputs, options = tensors(90), {"causal": causal, "capping": (0.5, 1.5), "sample_size": 5}
    expected = hyper(inputs, **options)
    for left, right in ((7, 0), (0, 13), (40, 40)):
        padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=9.0) for x in inputs]
        mask = torch.zeros(1, left + 90 + right, dtype=torch.bool)
        mask[:, left : left + 90] = True
        output = hyper(padded, key_mask=mask, **options)
        torch.testing.assert_close(output[:, :, left : left + 90], expected, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_any_size_give_finite_outputs_and_gradients_in_float32(causal):
    """Sums of e^1000 and of e^-1000, and tokens hidden in the middle."""
    mask = torch.ones(1, 90, dtype=torch.bool)
    mask[:, 20:45] = False
    for factor in (1e-3, 1.0, 20.0, -20.0):
        inputs = [x.float() for x in tensors(90)]
        inputs[0] = factor * inputs[0].abs()
        inputs[1] = 0.1 * factor * inputs[1] + abs(factor)
        inputs = [x.requires_grad_() for x in inputs]
        output = hyper(inputs, causal=causal, capping=(1.0, 2.0), key_mask=mask)
        grads = torch.autograd.grad(output[:, :, mask[0]].square().sum(), inputs)
        assert all(x.isfinite().all() for x in (output, *grads)), factor


@pytest.mark.parametrize(
    ("capping", "error", "message"),
    [
        (0.5, ValueError, r"must be a pair \(epsilon, kappa\) or None, got 0.5"),
        ((0.0, 2.0), ValueError, "epsilon of capping must be a number above 0, got 0.0"),
        ((0.5, 0.5), ValueError, "kappa of capping must be a number from 1 on, got 0.5"),
        ((0.5, "2"), TypeError, "must be two numbers"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(capping, error, message):
    with pytest.raises(error, match=message):
        hyper(tensors(), capping=capping)
