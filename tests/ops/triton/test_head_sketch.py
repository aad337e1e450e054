"""The programs of norm and sketch of heads under Triton's interpreter, against the definition in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math

import pytest
import torch
import triton as compiler
import triton.language as tl

from attention.covering import first_always
from polysketch.attention import PolysketchPaperAttention
from polysketch.ops.head_sketch import api, head_sketch, head_sketch_backend
from polysketch.ops.head_sketch.triton.programs import backward, forward
from polysketch.ops.head_sketch.triton.programs.backward import add_up as add_both
from polysketch.ops.head_sketch.triton.programs.forward import load_matrix as load_either
from polysketch.ops.triton import forced, self_check

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SMALL = {"TOKENS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("head_sketch", "head_sketch_backward")


@pytest.fixture
def small_blocks():
    """Several tiles of rows and of features at sizes that the interpreter can do."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield


@pytest.fixture
def programs_on_a_cpu(nothing_asked, monkeypatch):
    """A CPU that "auto" of this op alone takes for a device of the programs, which has asked nothing yet."""
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


def case(shape=(1, 2, 19, 20), *, maps=1, features=21):
    """x of another mean and deviation in every row, scale, bias, matrices that keep its size, or none."""
    generator = torch.Generator().manual_seed(features)
    normal = lambda *sizes: torch.randn(sizes, generator=generator)  # noqa: E731
    x = normal(*shape) * normal(*shape[:3], 1).exp() + normal(*shape[:3], 1)
    matrices = normal(maps, 2, shape[3], features) * shape[3] ** -0.5 if features else None
    return x, 1 + normal(shape[3]) / 4, normal(shape[3]), matrices


def outputs_and_gradients(x, scale, bias, matrices, backend="triton", wanted=("normed", "features")):
    """Normed heads, features, and gradients of x, scale and bias from those of the outputs that are wanted."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, scale, bias)]  # a copy would be dense
    normed, features = head_sketch(*leaves, matrices, backend=backend)
    outputs = {"normed": normed} | ({} if features is None else {"features": features})
    generator = torch.Generator().manual_seed(7)
    cotangents = {
        name: torch.randn(output.shape, generator=generator).to(x.dtype).to(output) for name, output in outputs.items()
    }
    given = [name for name in outputs if name in wanted]
    gradients = torch.autograd.grad([outputs[name] for name in given], leaves, [cotangents[name] for name in given])
    return [*(output.detach() for output in outputs.values()), *gradients]


def relative_errors(given, dtype=torch.float32, wanted=("normed", "features")):
    """Of both outputs and all gradients, the programs' in `dtype` against the definition in float64."""
    rounded = [None if tensor is None else tensor.to(dtype) for tensor in given]
    found = outputs_and_gradients(*rounded, wanted=wanted)
    exact = [None if tensor is None else tensor.double() for tensor in rounded]
    expected = outputs_and_gradients(*exact, "reference", wanted)
    assert {a.dtype for a in found} == {dtype}
    # max() would pass over what is not a number
    return [((a - b).norm() / b.norm()).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("maps", first_always([4, 1, 2]))
def test_outputs_and_gradients_agree_with_the_definition_in_float64(maps):
    assert max(relative_errors(case((2, 4, 9, 20), maps=maps))) < 2e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("width", "features", "tokens"),
    first_always(
        [(16, 33, 17), (33, 16, 1), (20, 0, 40), (64, 4, 16), (5, 50, 3), (7, 1, 1), (130, 3, 5)], 4, several=True
    ),
)
def test_of_any_width_and_number_of_features_and_tokens(width, features, tokens):
    assert max(relative_errors(case((1, 2, tokens, width), features=features))) < 3e-6


@pytest.mark.parametrize("features", [40, 0])
def test_the_shipped_configurations_agree_with_the_definition(features):
    assert max(relative_errors(case((1, 1, 67, 20), features=features))) < 2e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("features", [21, 0])
def test_half_precision_differs_by_its_rounding(features):
    assert max(relative_errors(case(features=features), torch.float16)) < 2e-3


@pytest.mark.usefixtures("small_blocks")
def test_features_are_of_the_normed_heads_as_they_are_rounded():
    x, scale, bias, matrices = (tensor.half() for tensor in case((1, 2, 30, 20)))
    normed, features = head_sketch(x, scale * 30, bias * 30, matrices, backend="triton")
    exact = head_sketch(*(tensor.double() for tensor in (x, scale * 30, bias * 30, matrices)), backend="reference")[1]
    left, right = (normed.double() @ matrix for matrix in matrices[0].double())
    rounding = (features - left * right).norm()
    assert rounding < 5e-4 * features.double().norm()  # of one rounding; three are twice as much
    assert (features - exact).norm() > 1.5 * rounding


@pytest.mark.usefixtures("small_blocks")
def test_weights_may_be_of_another_dtype_than_heads():
    """As under autocast; their gradients have theirs."""
    x, scale, bias, matrices = case()
    found = outputs_and_gradients(x.half(), scale, bias, matrices.half())
    expected = outputs_and_gradients(*(t.double() for t in (x.half(), scale, bias, matrices.half())), "reference")
    assert [one.dtype for one in found] == [torch.float16] * 3 + [torch.float32] * 2
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)) < 2e-3


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("wanted", [("normed",), ("features",)])
def test_either_gradient_may_be_missing(wanted, launched):
    given = case((1, 2, 19, 20))
    assert max(relative_errors(given, wanted=wanted)) < 2e-6
    assert launched == list(PROGRAMS)


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_give_the_same_and_the_gradient_lies_as_x_does():
    x, scale, bias, matrices = case((2, 2, 5, 12), maps=2, features=5)
    plain = outputs_and_gradients(x, scale, bias, matrices)
    between = x.transpose(1, 2).contiguous().transpose(1, 2)
    inside = x.transpose(1, 3).contiguous().transpose(1, 3)
    part = torch.cat([x, x], 2)[:, :, :5]
    turned = matrices.mT.contiguous().mT
    for one in (between, inside, part):
        assert one.stride() != x.stride()
        found = outputs_and_gradients(one, scale, bias, turned)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert outputs_and_gradients(between, scale, bias, turned)[2].stride() == between.stride()


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
def test_the_same_call_gives_the_same_bits():
    given = case((1, 2, 50, 20))
    first, second = (outputs_and_gradients(*given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_no_rows_have_no_features_and_gradients_of_zero():
    _, *weights = case()
    found = outputs_and_gradients(torch.ones(2, 1, 0, 20), *weights)
    assert found[1].shape == (2, 1, 0, 21)
    assert not any(gradient.any() for gradient in found[2:])


@pytest.mark.usefixtures("small_blocks")
def test_a_token_that_is_no_number_reaches_no_other():
    x, *weights = case()
    before = outputs_and_gradients(x, *weights)[:3]
    x[0, 1, 7] = torch.nan
    for found, intact in zip(outputs_and_gradients(x, *weights)[:3], before, strict=True):
        assert found[0, 1, 7].isnan().all()
        found[0, 1, 7] = intact[0, 1, 7]
        assert torch.equal(found, intact)


@pytest.mark.usefixtures("small_blocks")
def test_rows_whose_numbers_are_all_equal_are_the_bias():
    _, scale, bias, matrices = case()
    normed, features = head_sketch(torch.full((1, 2, 19, 20), 3.0), scale, bias, matrices, backend="triton")
    assert torch.equal(normed, bias.expand_as(normed))
    assert features.isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, scale, matrices: (x.bfloat16(), scale, None), "no bfloat16 products"),
        (lambda x, scale, matrices: (x.double(), scale, None), r"got torch\.float64"),
        (lambda x, scale, matrices: (x, scale, matrices.half()), r"got torch\.float16 and torch\.float32"),
        (lambda x, scale, matrices: (torch.ones(1, 1, 4, 257), scale, None), r"got \(1, 1, 4, 257\)"),
        (lambda x, scale, matrices: (x, scale, torch.ones(1, 2, 20, 0)), r"got \(1, 2, 20, 0\)"),
        (lambda x, scale, matrices: (x, scale, torch.ones(1, 4, 20, 3)), r"got \(1, 4, 20, 3\)"),
        (lambda x, scale, matrices: (x, scale, torch.ones(3, 2, 20, 3)), "multiple of 3 heads"),
        (lambda x, scale, matrices: (x, scale.long(), None), "scale of floating point"),
        (lambda x, scale, matrices: (x[:1, :1, :1].expand(1, 2**10, 2**21, 20), scale, None), "fewer than 2"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(change, reason):
    x, scale, _, matrices = case()
    with pytest.raises(RuntimeError, match=reason):
        head_sketch_backend(*change(x, scale, matrices), backend="triton")


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    x, scale, _, matrices = case()
    assert head_sketch_backend(x, scale, matrices, "triton") == "triton"
    assert head_sketch_backend(x, scale, matrices) == "reference"
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        head_sketch_backend(x, scale, matrices, "cuda")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("features", first_always([5, 0]))
@pytest.mark.parametrize("transposed", first_always([True, False]))
def test_it_is_an_operator_whose_fake_says_where_numbers_lie(transposed, features):
    """Compiled code trusts the fake's strides."""
    x, scale, bias, matrices = case((1, 2, 3, 6), features=features)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    of_normed, of_features = torch.ones_like(x), torch.ones(1, 2, 3, features) if features else None
    names = torch.ops.polysketch
    torch.library.opcheck(names.head_sketch.default, (x, scale, bias, matrices, 1e-5))
    torch.library.opcheck(names.head_sketch_backward.default, (of_normed, of_features, x, scale, bias, matrices, 1e-5))


@pytest.mark.parametrize("features", [21, 0])
def test_a_training_step_has_one_operation_beside_its_programs(features, operations):
    x, scale, bias, matrices = case(features=features)
    leaves = [tensor.requires_grad_() for tensor in (x, scale, bias)]
    with operations as noted:
        normed, _ = head_sketch(*leaves, matrices, backend="triton")
        torch.autograd.grad(normed, leaves, normed.detach())
    assert noted.found == ["sum.dim_IntList"]


MECHANISMS = {
    "random": ({"learned": False}, True),
    "random without a local part": ({"learned": False, "local_chunk": None}, True),
    "random with a gain": ({"learned": False, "prefix_gain": 0.5}, True),
    "a map a head": ({"learned": False, "share": "head"}, True),
    "degree 8": ({"learned": False, "degree": 8}, False),
    "degree 2": ({"learned": False, "degree": 2}, False),
    "srht": ({"learned": False, "projection": "srht"}, False),
    "learned": ({}, False),
}


def attended(mechanism, inputs):
    """Output and gradients of inputs and weights, the programs of the other ops left out."""
    leaves = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    output = mechanism(*leaves)
    weights = [weight for name, weight in mechanism.named_parameters() if "norm" in name and "map" not in name]
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return [output.detach(), *torch.autograd.grad(output, [*leaves, *weights], cotangent.to(output.dtype))]


@pytest.mark.parametrize("name", first_always(list(MECHANISMS), 2))
def test_the_mechanism_gives_the_same_by_the_programs_as_without(name, monkeypatch, programs_on_a_cpu, launched):
    options, sketched = MECHANISMS[name]
    torch.manual_seed(0)
    mechanism = PolysketchPaperAttention(4, 12, 2, **{"sketch_size": 8, "local_chunk": 16, **options})
    for norm in (mechanism.query_norm, mechanism.key_norm):
        torch.nn.init.normal_(norm.bias)
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    # As a layer hands them over: tokens before heads in memory.
    inputs = [torch.randn(2, 37, heads, 12).transpose(1, 2) for heads in (4, 2, 2)]
    found = attended(mechanism, inputs)
    # Queries and keys, after what compares both programs with the definition.
    assert launched.count("head_sketch") == launched.count("head_sketch_backward") == 3
    sizes = {key for _, key in self_check._answers if key.startswith("head_sketch ")}
    assert [f"features={8 if sketched else 0} " in one for one in sizes] == [True]
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    launched.clear()
    expected = attended(mechanism, inputs)
    assert "head_sketch" not in launched
    errors = [((a - b).norm() / b.norm()).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)]
    assert max(errors) < 1e-5
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_programs_that_disagree_are_named_and_the_mechanism_goes_on_without(programs_on_a_cpu, monkeypatch):
    torch.manual_seed(0)
    mechanism = PolysketchPaperAttention(2, 12, sketch_size=8, local_chunk=16, learned=False)
    inputs = [torch.randn(1, 2, 20, 12) for _ in range(3)]
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    expected = mechanism.operands(*inputs[:2], torch.float32, None)
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})
    monkeypatch.setattr(forward, "affine", without_bias)
    with pytest.warns(UserWarning, match="disagree with plain PyTorch.*head_sketch"):
        found = mechanism.operands(*inputs[:2], torch.float32, None)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert torch.equal(found[1]["local"].query, expected[1]["local"].query)


def test_an_exported_graph_has_pytorchs_operations(programs_on_a_cpu):
    mechanism = PolysketchPaperAttention(2, 12, sketch_size=8, local_chunk=None, learned=False).eval()
    inputs = tuple(torch.randn(1, 2, 20, 12) for _ in range(3))
    graph = torch.export.export(mechanism, inputs).graph
    assert "head_sketch" not in str(graph)
    assert "layer_norm" in str(graph)


@compiler.jit
def without_bias(standard, scale, bias, INPUTS: tl.constexpr, LANES: tl.constexpr):
    return standard * forward.load_weights(scale, INPUTS, LANES)[None, :]


@compiler.jit
def always_the_first(of_map, index, columns, INPUTS: tl.constexpr, FEATURES: tl.constexpr, LANES: tl.constexpr):
    return load_either(of_map, 0, columns, INPUTS, FEATURES, LANES)


@compiler.jit
def without_the_mean(change, standard, steep, INPUTS: tl.constexpr):
    along = tl.sum(change * standard, 1) / INPUTS
    return (change - standard * along[:, None]) * steep[:, None]


@compiler.jit
def as_of_bias(sums, of_scale, of_bias, INPUTS: tl.constexpr, LANES: tl.constexpr):
    add_both(sums, of_bias, of_bias, INPUTS, LANES)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        (forward, "affine", without_bias, [True, True, False, False, False]),
        (forward, "load_matrix", always_the_first, [False, True, False, False, False]),
        (backward, "affine", without_bias, [False, False, True, True, True]),
        (backward, "load_matrix", always_the_first, [False, False, True, True, True]),
        (backward, "through_norm", without_the_mean, [False, False, True, False, False]),
        (backward, "add_up", as_of_bias, [False, False, False, True, False]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    given = case()
    monkeypatch.setattr(module, name, broken)
    assert [error > 1e-2 for error in relative_errors(given)] == wrong
