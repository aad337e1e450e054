"""The programs of the low-rank sketch compute its definition in float64, and so do their gradients."""

import pytest
import torch
from torch import Tensor

from polysketch.ops.low_rank_sketch import api, low_rank_sketch, low_rank_sketch_backend, native, reference
from polysketch.ops.native import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def tensors(tokens=75, *, heads=4, maps=2, rank=1, degree=4, inputs=20, features=70) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, heads, tokens, inputs, generator=generator)
    return x, torch.randn(maps, rank, degree, inputs, features, generator=generator) * inputs**-0.5


def with_gradients(function, x: Tensor, factors: Tensor) -> list[Tensor]:
    """Features, and the gradients of a sum that weighs every entry otherwise."""
    x, factors = (tensor.detach().requires_grad_() for tensor in (x, factors))
    features = function(x, factors)
    weights = torch.arange(features.numel(), dtype=features.dtype).sin().view_as(features)
    return [features.detach(), *torch.autograd.grad((features * weights).sum(), (x, factors))]


@pytest.fixture(autouse=True)
def keep_nothing(monkeypatch):
    """Programs run for small inputs, too."""
    monkeypatch.setattr(api, "_CACHED", 0)


def assert_exact(x: Tensor, factors: Tensor) -> None:
    assert native.why_not(x, factors) is None
    found = with_gradients(low_rank_sketch, x, factors)
    expected = with_gradients(reference.low_rank_sketch, x.double(), factors.double())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() < 2e-6 * other.norm()


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rank", [1, 3])
def test_features_and_gradients_are_those_of_the_definition(degree, rank):
    assert_exact(*tensors(degree=degree, rank=rank))


@pytest.mark.parametrize("tokens", [16, 32, 33, 200])
@pytest.mark.parametrize("features", [1, 16, 64, 65, 300])
def test_of_any_number_of_tokens_and_features(tokens, features):
    assert_exact(*tensors(tokens, features=features))


@pytest.mark.parametrize("inputs", [1, 16, 33, 128])
@pytest.mark.parametrize("maps", [1, 2, 4])
def test_of_any_width_and_number_of_maps(inputs, maps):
    assert_exact(*tensors(inputs=inputs, maps=maps))


def test_of_any_strides():
    x, factors = tensors()
    assert_exact(x.transpose(1, 2).contiguous().transpose(1, 2), factors)
    assert_exact(x.mT.contiguous().mT, factors.mT.contiguous().mT)
    assert_exact(x[:, :, ::2, 1:], factors[:, :, :, 1:])


def test_one_thread_and_three_compute_the_same_features_and_gradients():
    """Two maps for three threads: each works on a third of the tokens. Gradients of factors are sums of threads."""
    x, factors = tensors(800, features=256)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(low_rank_sketch, x, factors)
        torch.set_num_threads(3)
        together = with_gradients(low_rank_sketch, x, factors)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])
    assert (alone[2] - together[2]).norm() < 2e-6 * alone[2].norm()


def test_a_token_that_is_no_number_reaches_no_other():
    x, factors = tensors()
    before = low_rank_sketch(x, factors)
    x[0, 1, 40] = torch.nan
    after = low_rank_sketch(x, factors)
    assert after[0, 1, 40].isnan().all()
    after[0, 1, 40] = before[0, 1, 40]
    assert torch.equal(after, before)


@pytest.mark.parametrize("case", ["few tokens", "float64"])
def test_what_the_programs_do_not_take_is_computed_by_the_definition(case):
    x, factors = tensors(15) if case == "few tokens" else (tensor.double() for tensor in tensors())
    assert native.why_not(x, factors) is not None
    assert torch.equal(low_rank_sketch(x, factors), reference.low_rank_sketch(x, factors))


def test_few_linear_maps_are_kept_for_a_gradient_and_only_then(monkeypatch):
    x, factors = tensors()
    monkeypatch.setattr(api, "_CACHED", 2**22)
    calls = []

    def noted(name: str, program):
        return lambda *given: calls.append(name) or program(*given)

    programs = zip(("forward", "backward"), api.BACKENDS["native"], strict=True)
    monkeypatch.setitem(api.BACKENDS, "native", tuple(noted(*program) for program in programs))
    with_gradients(low_rank_sketch, x, factors)
    assert calls == []
    low_rank_sketch(x, factors)
    assert calls == ["forward"]
    with_gradients(low_rank_sketch, *tensors(3000, features=300))
    assert calls == ["forward", "forward", "backward"]


def test_a_backend_that_is_asked_for_is_taken_or_refused_with_the_reason():
    x, factors = tensors()
    assert low_rank_sketch_backend(x, factors) == low_rank_sketch_backend(x, factors, "native") == "native"
    assert torch.equal(low_rank_sketch(x, factors, backend="native"), low_rank_sketch(x, factors))
    assert torch.equal(low_rank_sketch(x, factors, backend="reference"), reference.low_rank_sketch(x, factors))
    with pytest.raises(RuntimeError, match="for 16 tokens or more"):
        low_rank_sketch(x[:, :, :15], factors, backend="native")
    with pytest.raises(RuntimeError, match="triton backend"):
        low_rank_sketch(x, factors, backend="triton")
    with pytest.raises(ValueError, match=r"unknown backend 'plain'; expected 'auto', 'native', 'reference', 'triton'"):
        low_rank_sketch(x, factors, backend="plain")


def test_the_operator_passes_opcheck():
    arguments = tuple(tensor.requires_grad_() for tensor in tensors(40, features=20))
    torch.library.opcheck(torch.ops.polysketch.low_rank_sketch.default, (*arguments, "native"))


def test_operations_are_counted_forward_and_backward():
    from torch.utils.flop_counter import FlopCounterMode

    x, factors = (tensor.requires_grad_() for tensor in tensors())
    forward = 2 * 2 * 4 * 75 * 4 * 20 * 70
    with FlopCounterMode(display=False) as counter:
        features = api.low_rank_sketch(x, factors)
        assert counter.get_total_flops() == forward
        features.sum().backward()
    assert counter.get_total_flops() == 4 * forward
