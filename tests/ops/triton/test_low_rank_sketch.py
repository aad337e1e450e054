"""The programs of the low-rank sketch under Triton's interpreter, against the definition in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math

import pytest
import torch
import triton as compiler
import triton.language as tl

from attention.covering import first_always
from polysketch.ops.low_rank_sketch import low_rank_sketch, low_rank_sketch_backend
from polysketch.ops.low_rank_sketch.triton import launcher
from polysketch.ops.low_rank_sketch.triton.programs import backward, features
from polysketch.ops.triton import forced
from polysketch.ops.triton.launch import launching

SMALL = {"TOKENS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("low_rank_sketch", "low_rank_sketch_inputs_backward", "low_rank_sketch_factors_backward")


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks():
    """Several tiles of rows and of features at sizes that the interpreter can do."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield


def case(shape=(1, 2, 19, 20), *, maps=1, rank=1, degree=4, features=21):
    """x, factors that keep its size, a gradient of the features."""
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(shape, generator=generator)
    factors = torch.randn(maps, rank, degree, shape[3], features, generator=generator) * shape[3] ** -0.5
    return x, factors, torch.randn(*shape[:3], features, generator=generator)


def features_and_gradients(x, factors, cotangent, backend="triton"):
    """Features and the gradients of x and the factors."""
    tensors = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, factors)]
    features = low_rank_sketch(*tensors, backend=backend)
    return [features.detach(), *torch.autograd.grad(features, tensors, cotangent)]


def relative_errors(x, factors, cotangent, dtype=torch.float32):
    """Of the features and both gradients, the programs' in `dtype` against the definition in float64."""
    rounded = [tensor.to(dtype) for tensor in (x, factors, cotangent)]
    found = features_and_gradients(*rounded)
    expected = features_and_gradients(*(tensor.double() for tensor in rounded), "reference")
    assert [a.dtype for a in found] == [dtype] * 3
    # max() would pass over what is not a number
    return [((a - b).norm() / b.norm()).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("degree", "rank", "maps"),
    first_always(
        [(4, 1, 1), (1, 2, 1), (2, 3, 2), (3, 1, 2), (6, 2, 1), (8, 1, 4), (4, 4, 4), (1, 1, 1)], 4, several=True
    ),
)
def test_features_and_gradients_agree_with_the_definition_in_float64(degree, rank, maps):
    assert max(relative_errors(*case((2, 4, 5, 20), degree=degree, rank=rank, maps=maps))) < 2e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("inputs", "features", "tokens"),
    first_always([(1, 1, 1), (16, 33, 17), (33, 16, 40), (5, 50, 3), (64, 4, 16), (128, 3, 5)], 3, several=True),
)
def test_of_any_width_and_number_of_features_and_tokens(inputs, features, tokens):
    assert max(relative_errors(*case((1, 2, tokens, inputs), degree=2, features=features))) < 2e-6


def test_the_shipped_configurations_agree_with_the_definition():
    assert max(relative_errors(*case((1, 1, 67, 20), degree=2, features=40))) < 2e-6


@pytest.mark.usefixtures("small_blocks")
def test_half_precision_differs_by_its_rounding():
    assert max(relative_errors(*case(rank=2, degree=2), torch.float16)) < 1e-3


@pytest.mark.usefixtures("small_blocks")
def test_a_map_may_leave_the_range_of_float16_where_the_product_does_not():
    x, factors, cotangent = case(degree=2)
    factors[:, :, 0] *= 3e4
    factors[:, :, 1] /= 3e4
    rounded = [tensor.half() for tensor in (x * 8, factors, cotangent)]
    assert (rounded[0] @ rounded[1][0, 0, 0]).isinf().any()
    assert max(relative_errors(*rounded, torch.float16)[:2]) < 1e-3  # gradients of factors are a map's size


@pytest.mark.usefixtures("small_blocks")
def test_maps_of_zero_have_the_gradients_that_the_others_give_them():
    """No product of all maps is divided by one of them."""
    x, factors, cotangent = case((1, 1, 9, 12), degree=3)
    factors[:, :, 1] = 0
    features, of_x, of_factors = features_and_gradients(x, factors, cotangent)
    assert not features.any()
    assert not of_factors[:, :, [0, 2]].any()
    assert of_factors[:, :, 1].abs().min() > 0
    assert not of_x.any()
    assert relative_errors(x, factors, cotangent)[2] < 2e-6


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_give_the_same():
    x, factors, cotangent = case((2, 2, 5, 12), maps=2, degree=2, features=5)
    plain = features_and_gradients(x, factors, cotangent)
    between = x.transpose(1, 2).contiguous().transpose(1, 2)
    inside = x.transpose(1, 3).contiguous().transpose(1, 3)
    assert between.stride() != x.stride()
    assert inside.stride(3) != 1
    turned_factors, turned_grad = (tensor.mT.contiguous().mT for tensor in (factors, cotangent))
    for turned in (between, inside):
        found = features_and_gradients(turned, turned_factors, turned_grad)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_factors_are_summed_over_spans_of_tiles_the_same_twice(monkeypatch):
    monkeypatch.setattr(launcher, "_LEAST_TILES", 1)
    given, found, launched = case((1, 1, 40, 16), degree=2, features=5), [], []

    def launch(kernel, programs, arguments, options):
        launched.append(programs)
        kernel[(programs,)](*arguments, **options)

    for count in (1, 512, 512):
        monkeypatch.setattr(launcher, "_PROGRAMS", count)
        with launching(launch):
            found.append(features_and_gradients(*given)[2])
    assert launched[2::3] == [1, 3, 3]
    assert (found[0] - found[1]).norm() < 1e-6 * found[0].norm()
    assert torch.equal(found[1], found[2])
    assert max(relative_errors(*given)) < 2e-6


@pytest.mark.usefixtures("small_blocks")
def test_no_rows_have_no_features_and_gradients_of_zero():
    _, factors, _ = case()
    found = features_and_gradients(torch.ones(2, 1, 0, 20), factors, torch.ones(2, 1, 0, 21))
    assert found[0].shape == (2, 1, 0, 21)
    assert all(not gradient.any() for gradient in found[1:])


@pytest.mark.usefixtures("small_blocks")
def test_a_token_that_is_no_number_reaches_no_other():
    x, factors, cotangent = case(degree=2, features=5)
    before = features_and_gradients(x, factors, cotangent)
    x[0, 1, 7] = torch.nan
    after = features_and_gradients(x, factors, cotangent)
    for found, intact in zip(after[:2], before[:2], strict=True):
        assert found[0, 1, 7].isnan().all()
        found[0, 1, 7] = intact[0, 1, 7]
        assert torch.equal(found, intact)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, factors: (x.bfloat16(), factors.bfloat16()), "no bfloat16 products"),
        (lambda x, factors: (x.double(), factors.double()), r"got torch\.float64"),
        (lambda x, factors: (x, factors.half()), r"got torch\.float16 and torch\.float32"),
        (lambda x, factors: (x, torch.ones(1, 1, 9, 20, 3)), "got degree 9 and 20 inputs"),
        (lambda x, factors: (torch.ones(1, 1, 4, 257), torch.ones(1, 1, 4, 257, 3)), "got degree 4 and 257 inputs"),
        (lambda x, factors: (x, torch.ones(1, 1, 2, 20, 0)), r"got \(1, 1, 2, 20, 0\)"),
        (lambda x, factors: (x[:1, :1, :1].expand(1, 2**10, 2**21, 20), factors), r"got \(1, 1024, 2097152, 20\)"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(change, reason):
    x, factors = change(*case()[:2])
    with pytest.raises(RuntimeError, match=reason):
        low_rank_sketch(x, factors, backend="triton")


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    x, factors, _ = case()
    assert low_rank_sketch_backend(x, factors, "triton") == "triton"
    assert low_rank_sketch_backend(x, factors) != "triton"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_an_operator_whose_fake_says_where_numbers_lie(transposed):
    """Compiled code trusts the fake's strides."""
    x, factors, cotangent = case((1, 2, 3, 6), degree=1, features=4)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    operator = torch.ops.polysketch.low_rank_sketch_backward.default
    torch.library.opcheck(operator, (cotangent, x, factors, "triton"))


@compiler.jit
def always_the_first(of_map, index, columns, INPUTS: tl.constexpr, FEATURES: tl.constexpr, LANES: tl.constexpr):
    return backward.load_factor(of_map, 0, columns, INPUTS, FEATURES, LANES)


@compiler.jit
def without_the_maps_after(before, maps, FACTOR: tl.constexpr):
    return before


@compiler.jit
def without_any_rows(sums, taken, before, maps, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return sums


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        (features, "load_factor", always_the_first, [True, False, False]),
        (backward, "times_after", without_the_maps_after, [False, True, True]),
        (backward, "add_changes", without_any_rows, [False, False, True]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    assert [error > 1e-2 for error in relative_errors(*case(degree=3))] == wrong
