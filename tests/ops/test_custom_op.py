"""Operators without a forward-mode derivative say so: none takes a tensor with a tangent for a constant."""

import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from polysketch import ops
from polysketch.models.cross_entropy import token_losses
from polysketch.models.divergence import token_divergences
from polysketch.ops.custom_op import custom_op
from polysketch.ops.learned_sketch import learned_sketch

# PyTorch's own, as it reads its formulas of forward mode for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")


@custom_op("polysketch_tests::scaled")
def scaled(x: Tensor, factors: list[Tensor]) -> Tensor:
    """x times every factor."""
    for factor in factors:
        x = x * factor
    return x.clone()


@custom_op("polysketch_tests::scaled_backward")
def scaled_backward(grad: Tensor, factors: list[Tensor]) -> Tensor:
    """The gradient of x."""
    for factor in factors:
        grad = grad * factor
    return grad.clone()


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1])


def _backward(ctx, grad):
    factors = list(ctx.saved_tensors)
    return scaled_backward(grad, factors), [None] * len(factors)


scaled.register_autograd(_backward, setup_context=_setup)
scaled.register_fake(lambda x, factors: torch.empty_like(x))
scaled_backward.register_fake(lambda grad, factors: torch.empty_like(grad))


def normal(*shape: int, dtype=torch.float32, seed=0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


refused = pytest.raises(NotImplementedError, match="has no forward-mode derivative, got a tensor with a tangent")


@pytest.mark.parametrize(
    "transform", [lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.jacfwd(f)(x)]
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_tangent_is_refused_wherever_it_comes_in(transform, grad):
    x, factor = normal(3), normal(3, seed=1)
    with torch.set_grad_enabled(grad):
        with refused:
            transform(lambda x: scaled(x, [factor]), x)
        with refused:
            transform(lambda y: scaled(x, [factor, y]), factor)


def test_a_tangent_that_comes_in_by_the_gradient_is_refused():
    x, factor = normal(3).requires_grad_(), normal(3, seed=1)
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(normal(3, seed=2), factor)
        with refused:
            torch.autograd.grad((scaled(x, [factor]) * weight).sum(), x)


def test_no_other_test_imports_this_module():
    """It would be loaded twice, and PyTorch frees the first operators of a name when others of that name are made."""
    assert "ops.test_custom_op" not in sys.modules


def test_without_tangents_nothing_changes_in_forward_mode_or_compiled():
    x, factor = normal(3).requires_grad_(), normal(3, seed=1)
    _, tangent = torch.func.jvp(lambda y: y * scaled(x.detach(), [factor]), (factor,), (factor,))
    torch.testing.assert_close(tangent, x.detach() * factor * factor)
    assert torch.equal(torch.autograd.grad(scaled(x, [factor, factor]).sum(), x)[0], factor * factor)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: scaled(x, [factor]), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x * factor)


def _learned_sketch(x: Tensor, backend: str) -> Tensor:
    weights = [normal(*shape, seed=i) for i, shape in enumerate([(4,), (4,), (32, 4), (4, 32)] * 4)]
    return learned_sketch(x, weights, 2, backend=backend)


def _linear(x: Tensor, backend: str) -> Tensor:
    return ops.linear_attention(x, x, x, power=2, causal=True, backend=backend).output


def _polynomial(x: Tensor, backend: str) -> Tensor:
    return ops.polynomial_attention(x, x, x, causal=True, backend=backend)


def _squared(x: Tensor, backend: str) -> Tensor:
    return ops.squared_polynomial_attention(x, x, x, coefficients=torch.ones(3), causal=True, backend=backend)


def _hyper(x: Tensor, backend: str) -> Tensor:
    return ops.hyper_attention(
        x, x, x, hyperplanes=normal(4, 3), causal=True, min_length=4, chunk_size=2, sample_size=2
    )


def _heavy(x: Tensor, backend: str) -> Tensor:
    codes, before = torch.zeros(x.shape[:3], dtype=torch.int64), torch.arange(x.shape[2]).expand(1, -1)
    return ops.heavy_correction(x, x, x, x, x, query_codes=codes, key_codes=codes, before=before)


def _window(x: Tensor, backend: str) -> Tensor:
    return ops.sliding_window_attention(x, x, x, window=4, causal=True, backend=backend)


def _losses(x: Tensor, backend: str) -> Tensor:
    return token_losses(x[0], normal(5, 4), normal(5), torch.zeros(x.shape[1:3], dtype=torch.int64))


def _divergences(x: Tensor, backend: str) -> Tensor:
    return token_divergences(x[0], normal(5, 4), normal(5), normal(*x[0].shape, seed=1), normal(5, 4), normal(5))


def _delta(x: Tensor, backend: str) -> Tensor:
    return ops.delta_writes(x, x, x[..., 0], factors=2, backend=backend)


EVERY = pytest.mark.parametrize(
    ("function", "backend"),
    [
        (_learned_sketch, "chunked"),
        (_learned_sketch, "native"),
        (_linear, "chunked"),
        (_linear, "native"),
        (_polynomial, "blockwise"),
        (_squared, "blockwise"),
        (_hyper, ""),
        (_heavy, ""),
        (_window, "native"),
        (_losses, ""),
        (_divergences, ""),
        (_delta, "chunked"),
        (_delta, "native"),
    ],
)


@pytest.fixture
def small(backend: str) -> Tensor:
    """Queries, keys and values, where there is a compiler if the backend needs one."""
    if backend == "native" and ops.native.why_unavailable() is not None:
        pytest.skip("no compiler")
    return normal(1, 2, 16, 4)


@pytest.mark.parametrize("grad", [True, False])
@EVERY
def test_every_operator_of_ours_refuses_it(function, backend, grad, small):
    with torch.set_grad_enabled(grad), refused:
        torch.func.jvp(lambda x: function(x, backend), (small,), (small,))
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), refused:
        function(forward_ad.make_dual(small, small), backend)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("grad", [True, False])
@EVERY
def test_a_call_that_is_spared_gives_what_the_operator_gives(function, backend, grad, small):
    """Spared are calls without a gradient to take, but for those of tensors that stand in for others."""
    rows = torch.stack([small, small.flip(2)])
    with torch.set_grad_enabled(grad):
        expected = torch.stack([function(row.requires_grad_(), backend).detach() for row in rows.clone()])
        assert torch.equal(torch.stack([function(row, backend) for row in rows]), expected)
        if function in (_learned_sketch, _hyper):  # a list of tensors, a draw: PyTorch has no vmap of these
            return
        torch.testing.assert_close(torch.vmap(lambda x: function(x, backend), randomness="same")(rows), expected)


@EVERY
def test_a_gradient_by_a_transform_is_refused_by_pytorch_and_not_lost(function, backend, small):
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: function(x, backend).square().sum())(small)


def test_a_call_that_is_spared_calls_no_operator(monkeypatch):
    def refuse(*_):
        raise AssertionError("called")

    monkeypatch.setattr(scaled, "_definition", refuse)
    x, weight = normal(3), torch.nn.Parameter(normal(3, seed=1))
    scaled(x, [x])
    with torch.no_grad():
        scaled(x, [weight])
    for given in ([weight], [x, weight]):
        with pytest.raises(AssertionError, match="called"):
            scaled(x, given)
    with torch.no_grad(), torch.autocast("cpu"), pytest.raises(AssertionError, match="called"):
        scaled(x, [x])


def test_decoding_refuses_a_tangent():
    query, key, value = normal(1, 2, 1, 4), normal(1, 2, 1, 4, seed=1), normal(1, 2, 1, 3, seed=2)

    def decode(new: Tensor) -> Tensor:
        return ops.linear_attention_extend_(query, key, new, ops.LinearAttentionState.init(1, 2, 4, 3))

    with refused:
        torch.func.jvp(decode, (value,), (value,))
