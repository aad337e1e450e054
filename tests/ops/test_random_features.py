"""The program of random features computes their definition in float64, and so does its gradient."""

import ctypes
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import PerformerFeatures
from polysketch.ops.native import build, why_unavailable
from polysketch.ops.random_features import api, native, random_features, random_features_backend, reference

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SOURCE = Path(build.__file__).parent / "source"
OF_WHAT = ["queries", "keys", "relu"]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What the program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def call(of: str, width: int, features: int):
    """The features of queries, of keys, or by ReLUs, with the weights and the constant of a feature map."""
    drawn = PerformerFeatures(width, num_features=features, seed=0)

    def compute(x: Tensor, backend: str) -> Tensor:
        constant = drawn.key_constant if of == "keys" else None
        kind = "relu" if of == "relu" else "softmax"
        return random_features(x, drawn.weight, constant, kind=kind, backend=backend)

    return compute


def inputs(tokens: int = 75, width: int = 20) -> Tensor:
    return torch.randn(2, 3, tokens, width, generator=torch.Generator().manual_seed(tokens))


def with_gradient(compute, x: Tensor, backend: str) -> list[Tensor]:
    """Features, and the gradient of a sum that weighs every entry otherwise."""
    x = x.detach().requires_grad_()
    features = compute(x, backend)
    weights = torch.arange(features.numel(), dtype=features.dtype).sin().view_as(features)
    return [features.detach(), *torch.autograd.grad((features * weights).sum(), x)]


def assert_exact(of: str, x: Tensor, features: int = 70) -> None:
    compute = call(of, x.shape[3], features)
    found, expected = with_gradient(compute, x, "native"), with_gradient(compute, x.double(), "reference")
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error = float((one - other).norm() / other.norm())
        assert error < 1e-5, f"relative errors beyond rounding: {of} {error}"


@pytest.mark.parametrize("of", OF_WHAT)
@pytest.mark.parametrize(("tokens", "features"), [(16, 2), (32, 16), (33, 64), (75, 65), (100, 300)])
def test_of_any_number_of_tokens_and_features(of, tokens, features):
    assert_exact(of, inputs(tokens), features)


@pytest.mark.parametrize("of", OF_WHAT)
@pytest.mark.parametrize("width", [1, 16, 33, 128])
def test_of_any_width(of, width):
    assert_exact(of, inputs(40, width))


@pytest.mark.parametrize("of", OF_WHAT)
def test_of_any_strides(of):
    x = inputs()
    for strided in (x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT, x[:, :, ::2, 1:]):
        assert_exact(of, strided)


@pytest.mark.parametrize("of", OF_WHAT)
def test_gradients_may_come_in_any_strides(of):
    compute, x = call(of, 20, 70), inputs().requires_grad_()
    upstream = torch.randn(70, 75, 3, 2).permute(3, 2, 1, 0)
    found, plain = (torch.autograd.grad(compute(x, by), x, upstream)[0] for by in ("native", "reference"))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_a_key_at_the_bound_of_its_exponent_has_the_largest_feature_and_no_gradient():
    """In heads so wide that the constant stops short: only there the bound is reached."""
    drawn = PerformerFeatures(200, num_features=20, seed=0)
    longest = drawn.weight[drawn.weight.norm(dim=-1).argmax()] * 200**0.25
    x = inputs(20, 200)
    x[1, 2, 7] = longest
    compute = call("keys", 200, 20)
    assert_exact("keys", x, 20)
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(compute(x, "native")[1, 2, 7].max(), x)
    assert not gradient.any()


def test_queries_whose_largest_exponents_are_equal_share_the_gradient():
    weight = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, -5.0]])
    x = torch.ones(1, 1, 16, 2, requires_grad=True)
    upstream = torch.tensor([1.0, 3.0, 7.0]).expand(1, 1, 16, 3)
    for by in ("native", "reference"):
        features = random_features(x, weight, None, backend=by)
        (gradient,) = torch.autograd.grad(features, x, upstream)
        # The two first are constant together, and so is the third but for its distance from them.
        third = features[0, 0, 0, 2] - 1e-6 * 3**-0.5
        expected = 7 * third * 2**-0.25 * (weight[2] - weight[0])
        torch.testing.assert_close(gradient[0, 0, 0], expected.detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("of", OF_WHAT)
def test_any_number_of_threads_gives_the_same_bits(of):
    x, compute = inputs(800), call(of, 20, 256)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(with_gradient(compute, x, "native"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("of", OF_WHAT)
def test_a_tokens_features_are_the_same_bits_wherever_it_stands(of):
    x, compute = inputs(75), call(of, 20, 70)
    assert torch.equal(compute(x[:, :, 13:], "native"), compute(x, "native")[:, :, 13:])


@pytest.mark.parametrize("of", OF_WHAT)
def test_a_token_that_is_no_number_reaches_no_other(of):
    x, compute = inputs(), call(of, 20, 70)
    before = compute(x, "native")
    x[0, 1, 40] = torch.nan
    after = compute(x, "native")
    assert after[0, 1, 40].isnan().all()
    after[0, 1, 40] = before[0, 1, 40]
    assert torch.equal(after, before)


@pytest.mark.parametrize("of", OF_WHAT)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_of_half_precision_features_are_those_of_the_same_numbers_in_float32(of, half):
    x, compute = inputs().to(half), call(of, 20, 70)
    found, wide = with_gradient(compute, x, "native"), with_gradient(compute, x.float(), "native")
    assert torch.equal(found[0], wide[0])
    assert found[1].dtype == half
    assert torch.equal(found[1], wide[1].to(half))


def test_auto_takes_the_program_where_it_can_and_the_definition_elsewhere():
    x, weight = inputs(), torch.randn(70, 20)
    assert random_features_backend(x, weight) == random_features_backend(x.bfloat16(), weight) == "native"
    assert random_features_backend(x[:, :, :15], weight) == "reference"
    assert random_features_backend(x.double(), weight) == "reference"
    learned = weight.clone().requires_grad_()
    assert random_features_backend(x, learned) == "reference"
    assert torch.autograd.grad(random_features(x, learned, None).square().sum(), learned)[0].any()
    with torch.no_grad():
        assert random_features_backend(x, learned) == "native"


def test_a_backend_that_is_asked_for_is_taken_or_refused_with_the_reason():
    x, weight = inputs(), torch.randn(70, 20)
    assert torch.equal(random_features(x, weight, None), random_features(x, weight, None, backend="native"))
    plain = random_features(x, weight, None, backend="reference")
    assert torch.equal(plain, reference.random_features(x, weight, None, "softmax"))
    with pytest.raises(RuntimeError, match="for 16 tokens or more"):
        random_features(x[:, :, :15], weight, None, backend="native")
    with pytest.raises(RuntimeError, match="no gradient of the random weights"):
        random_features(x, weight.requires_grad_(), None, backend="native")
    with pytest.raises(ValueError, match=r"unknown backend 'triton'; expected 'auto', 'native', 'reference'"):
        random_features(x, weight, None, backend="triton")
    with pytest.raises(ValueError, match="unknown kind 'elu'; known kinds: softmax, relu"):
        random_features(x, weight, None, kind="elu")


@pytest.mark.parametrize("constant", [None, torch.tensor(2.0)])
def test_the_operator_passes_opcheck(constant):
    x = inputs(16, 6)[:1, :2].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.polysketch.random_features.default, (x, torch.randn(5, 6), constant, "softmax"))
    features = torch.rand(1, 2, 16, 5) + 0.1
    arguments = (torch.randn(1, 2, 16, 5), features, x.detach(), torch.randn(5, 6), constant, "softmax")
    torch.library.opcheck(torch.ops.polysketch.random_features_backward.default, arguments)


def test_operations_are_counted_forward_and_backward():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight = inputs().requires_grad_(), torch.randn(70, 20)
    forward = 2 * 2 * 3 * 75 * 20 * 70
    with FlopCounterMode(display=False) as counter:
        features = api.random_features(x, weight, None)
        assert counter.get_total_flops() == forward
        features.sum().backward()
    assert counter.get_total_flops() == 2 * forward


FORWARD, SHARED, BACKWARD = "random_features.cpp", "random_features.h", "random_features_backward.cpp"
MUTANTS = {
    "the largest exponent of whole vectors alone": (
        SHARED,
        "for (; i < count; i++) found = std::max(",
        "if (0) std::max(",
    ),
    "the length of a key forgotten": (FORWARD, "0.5f * call_.input_scale *", "0.0f *"),
    "the constant of keys forgotten": (FORWARD, " + call_.constant;", ";"),
    "epsilon forgotten": (SHARED, "* call.scale + call.epsilon;", "* call.scale;"),
    "the last features forgotten": (FORWARD, "sizeof(float) * (call_.features - i)", "0"),
    "tokens of another head": (SHARED, "head % call.heads, token", "0 * head, token"),
    "no bound of exponents": (SHARED, "-87.0f, call.largest)", "-87.0f, 87.0f)"),
    "gradients beyond the bound": (BACKWARD, "feature < largest_ ?", "feature < 2.0f * largest_ ?"),
    "the gradient of the largest forgotten": (BACKWARD, "== most ? share : 0.0f", "== most ? 0.0f : 0.0f"),
    "the gradient of the length forgotten": (BACKWARD, "-totals[t] * call_.input_scale", "0.0f * call_.input_scale"),
    "epsilon in the derivative": (BACKWARD, "feature - call_.epsilon : Vector{}", "feature : Vector{}"),
    "relu lets all through": (BACKWARD, "return without > 0.0f ?", "return without >= 0.0f ?"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    checks = [partial(assert_exact, of, 4 * inputs(), features) for of in OF_WHAT for features in (5, 70)]
    at_the_bound = test_a_key_at_the_bound_of_its_exponent_has_the_largest_feature_and_no_gradient
    for check in (*checks, at_the_bound):
        check()
    broken = with_mutant(*MUTANTS[name], tmp_path)
    monkeypatch.setattr(native, "library", lambda: broken)
    caught = 0
    for check in (*checks, at_the_bound):
        try:
            check()
        except AssertionError:
            caught += 1
    assert caught


def with_mutant(file: str, old: str, new: str, folder: Path) -> ctypes.CDLL:
    """These programs alone, with one place of a file changed."""
    (folder / "source").mkdir()
    for path in (*SOURCE.glob("*.h"), *SOURCE.glob("random_features*.cpp")):
        shutil.copy(path, folder / "source")
    text = (folder / "source" / file).read_text()
    assert text.count(old) == 1
    (folder / "source" / file).write_text(text.replace(old, new))
    return ctypes.CDLL(str(build.compiled(folder / "source", folder)))
