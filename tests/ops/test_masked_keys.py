"""NaN and inf at masked keys and values reach nothing: outputs, states and gradients have the bits of zeros there.

PyTorch's attention multiplies what it masks, so that `softmax_attention` and the blockwise window are no part of this.
"""

from functools import partial

import pytest
import torch

from polysketch import ops
from polysketch.ops.native import why_unavailable

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 40, 8
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(why_unavailable() is not None, reason="needs the native programs")
)


def mask():
    """Padding before the first row, and holes in both."""
    real = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3
    real[0, :5], real[1, 0], real[:, -1] = False, True, True
    return real


def spoiled(by):
    """Query, key and value, with a number at the masked keys and values."""
    generator = torch.Generator().manual_seed(0)
    query, *rest = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(3))
    return [x.requires_grad_() for x in (query, *(x.masked_fill(~mask()[:, None, :, None], by) for x in rest))]


def assert_masked_reach_nothing(call):
    """All that a call gives, and all gradients."""
    found = []
    for by in (0.0, torch.nan, torch.inf):
        inputs = spoiled(by)
        outputs = call(*inputs)
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
        gradients = torch.autograd.grad(loss, inputs) if loss.requires_grad else ()
        found.append([x.detach() for x in (*outputs, *gradients)])
    assert found[0][0].any()
    for other in found[1:]:
        assert all(torch.equal(one, expected) for one, expected in zip(other, found[0], strict=True))


@pytest.mark.parametrize("backend", ["reference", "chunked", NATIVE])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention(backend, power, local, causal):
    def call(query, key, value):
        near = ops.LocalPolynomial(query, key, 4, 16) if local else None
        decay = torch.where(mask()[:, None], -0.1, key[..., 0]) if causal else None
        options = {"power": power, "offset": 1.0, "local": near, "log_decay": decay, "return_state": causal}
        found = ops.linear_attention(query, key, value, causal=causal, key_mask=mask(), backend=backend, **options)
        state = [] if found.state is None else [x for name, x in found.state.tensors().items() if name != "position"]
        return found.output, found.denominator, *(x for x in state if x.numel())

    assert_masked_reach_nothing(call)


@torch.no_grad()
def decoded(query, key, value):
    state = ops.LinearAttentionState.init(BATCH, HEADS, WIDTH, WIDTH, power=2)
    one = [slice(i, i + 1) for i in range(LENGTH)]
    extend = partial(ops.linear_attention_extend_, power=2, offset=1.0)
    return [
        extend(*(x[:, :, i].contiguous() for x in (query, key, value)), state, key_mask=mask()[:, i]).output
        for i in one
    ]


@pytest.mark.parametrize("window_backend", ["reference", NATIVE])
@pytest.mark.parametrize("cached", [False, True])
def test_a_window(window_backend, cached):
    def call(query, key, value):
        options = {"window": 9, "key_mask": mask(), "backend": window_backend}
        if cached:
            return (ops.sliding_window_attention_with_cache(query[:, :, -7:], key, value, **options),)
        return (ops.sliding_window_attention(query, key, value, causal=True, **options),)

    assert_masked_reach_nothing(call)


PLANES = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(2))
OTHERS = {
    "decoding": decoded,
    "local": lambda *x: (ops.local_attention(*x, chunk=16, causal=True, key_mask=mask()),),
    "polynomial": lambda *x: (ops.polynomial_attention(*x, causal=True, key_mask=mask()),),
    "polynomial, cache": lambda q, *x: (ops.polynomial_attention_with_cache(q[:, :, -7:], *x, key_mask=mask()),),
    "squared polynomial": lambda *x: (ops.squared_polynomial_attention(*x, [1.0, 1.0, 0.5], key_mask=mask()),),
    "hyper": lambda *x: (
        ops.hyper_attention(*x, hyperplanes=PLANES, key_mask=mask(), chunk_size=8, sample_size=8, min_length=16),
    ),
    "nystrom": lambda *x: (ops.nystrom_attention(*x, num_landmarks=4, key_mask=mask()),),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_functions(call):
    assert_masked_reach_nothing(call)
