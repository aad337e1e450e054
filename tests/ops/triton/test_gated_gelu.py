"""The programs of a gated linear unit's middle under Triton's interpreter, against the formula in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import pytest
import torch
import torch.nn.functional as F
import triton as compiler
import triton.language as tl
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from attention.covering import first_always
from polysketch.nn import GatedLinearUnit
from polysketch.ops.gated_gelu import api, gated_gelu, gated_gelu_backend
from polysketch.ops.gated_gelu.triton.programs import backward, forward
from polysketch.ops.gated_gelu.triton.programs.forward import load_halves as load_both
from polysketch.ops.triton import forced

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SMALL = {"TOKENS": 4, "BLOCK": 16, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("gated_gelu", "gated_gelu_backward")


@pytest.fixture
def small_blocks():
    """Several tiles of rows and of columns, the last of them not full."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield


@pytest.fixture
def programs_on_a_cpu(nothing_asked, monkeypatch):
    """A CPU that "auto" of this op alone takes for a device of the programs, which has asked nothing yet."""
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def by_programs(joined):
    return gated_gelu(joined, backend="triton")


def by_formula(joined):
    gate, up = joined.split(joined.shape[-1] // 2, -1)
    return F.gelu(gate, approximate="tanh") * up


def output_and_gradient(joined, compute=by_programs):
    leaf = joined.detach().requires_grad_()
    output = compute(leaf)
    cotangent = normal(*output.shape).to(joined.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaf, cotangent)]


def relative_errors(joined):
    """Of output and gradient of either half, the programs' against the formula in float64."""
    found, expected = output_and_gradient(joined), output_and_gradient(joined.double(), by_formula)
    assert {one.dtype for one in found} == {joined.dtype}
    halves = lambda output, gradient: (output, *gradient.chunk(2, -1))  # noqa: E731
    pairs = zip(halves(*found), halves(*expected), strict=True)
    return [((a - b).norm() / b.norm()).nan_to_num(torch.inf).item() for a, b in pairs]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", first_always([(2, 3, 46), (9, 32), (3, 2), (2,), (1, 1, 70), (2, 3, 2, 34)], 3))
def test_output_and_gradient_are_those_of_the_formula_at_any_width_and_rows(shape):
    assert max(relative_errors(3 * normal(*shape))) < 1e-6


@pytest.mark.parametrize("inner", first_always([80, 7, 600]))
def test_the_shipped_configurations_agree_with_the_formula(inner):
    assert max(relative_errors(normal(5, 2 * inner))) < 1e-6


@pytest.mark.usefixtures("small_blocks")
def test_half_precision_is_rounded_once():
    joined = 3 * normal(9, 200).half()
    found, exact = by_programs(joined), by_formula(joined.double()).half()
    assert (found == exact).double().mean() > 0.99
    twice = F.gelu(joined[:, :100].float(), approximate="tanh").half() * joined[:, 100:]
    assert (twice == exact).double().mean() < 0.9
    assert max(relative_errors(joined)) < 1e-3


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # NumPy's, not a device's
@pytest.mark.usefixtures("small_blocks")
def test_gates_at_the_ends_and_no_numbers_give_what_the_formula_gives():
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, 8, -4, -8, 30, -30, 1e4, -1e4, 1e15, -1e15, *map(float, ("inf", "-inf", "nan"))]
    )
    joined = torch.stack([gate, torch.full_like(gate, 2.0)], 1)
    exact = output_and_gradient(joined.double(), by_formula)
    for found, expected in zip(output_and_gradient(joined), exact, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-12, equal_nan=True)


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_give_the_same():
    joined = normal(4, 3, 46)
    plain = output_and_gradient(joined)
    wide = torch.cat([joined, joined], -1)[..., :46]
    for one in (joined.transpose(0, 1).contiguous().transpose(0, 1), wide, joined.mT.contiguous().mT):
        assert not one.is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(output_and_gradient(one), plain, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_no_rows_and_no_columns_have_an_empty_gradient():
    assert [one.shape for one in output_and_gradient(normal(2, 0, 6))] == [(2, 0, 3), (2, 0, 6)]
    assert [one.shape for one in output_and_gradient(normal(2, 0))] == [(2, 0), (2, 0)]


@pytest.mark.usefixtures("small_blocks")
def test_nothing_but_the_projection_is_kept_for_backward():
    joined, kept = normal(5, 46).requires_grad_(), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda tensor: tensor):
        by_programs(joined)
    assert kept == [joined.data_ptr()]


@pytest.mark.usefixtures("small_blocks")
def test_the_operator_passes_opcheck():
    torch.library.opcheck(torch.ops.polysketch.gated_gelu.default, (normal(2, 3, 10).requires_grad_(),))


@pytest.mark.parametrize(
    ("joined", "reason"),
    [
        (normal(3, 4).bfloat16(), "no bfloat16"),
        (normal(3, 4).double(), r"got torch\.float64"),
        (normal(1, 4).expand(2**30, 4), r"fewer than 2\^30"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(joined, reason):
    with pytest.raises(RuntimeError, match=reason):
        by_programs(joined)


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    joined = normal(3, 4)
    assert gated_gelu_backend(joined, "triton") == "triton"
    assert gated_gelu_backend(joined) == "reference"
    assert torch.equal(gated_gelu(joined), by_formula(joined))
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        gated_gelu_backend(joined, "cuda")
    with pytest.raises(ValueError, match=r"inner\), got \(3, 5\)"):
        gated_gelu(normal(3, 5))


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_a_second_derivative_and_a_tangent_are_refused_where_a_program_runs():
    joined = normal(3, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        by_programs(forward_ad.make_dual(joined, joined))
    (gradient,) = torch.autograd.grad(by_programs(joined.requires_grad_()).sum(), joined, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_gelu_backward"):
        gradient.sum().backward()


def of_unit(unit, hidden):
    """What a unit gives, and gradients of its input and weights."""
    output = unit(hidden)
    return [output.detach(), *torch.autograd.grad(output, [hidden, *unit.parameters()], normal(*output.shape))]


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_a_unit_gives_the_same_by_the_programs_as_without(monkeypatch, launched):
    unit, hidden = GatedLinearUnit(12, 20), normal(2, 7, 12).requires_grad_()
    found = of_unit(unit, hidden)
    assert launched == list(PROGRAMS) * 2  # one of each to compare them with the definition
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    expected = of_unit(unit, hidden)
    assert len(launched) == 4
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_an_exported_unit_and_a_compiled_one_have_pytorchs_operations(launched):
    unit, hidden = GatedLinearUnit(12, 20), normal(2, 7, 12)
    operations = str(torch.export.export(unit, (hidden,)).graph)
    assert "gelu" in operations
    assert "gated_gelu" not in operations
    torch.compiler.reset()
    torch.compile(unit, fullgraph=True, backend="eager")(hidden)
    assert not launched


@compiler.jit
def without_the_square(gate):
    return tl.full(gate.shape, forward.LINEAR, tl.float32)


@compiler.jit
def of_zero(gate):
    return tl.full(gate.shape, 0.5, tl.float32), tl.full(gate.shape, 0.25, tl.float32)


@compiler.jit
def swapped(joined, row, stride, columns, seen, WIDTH: tl.constexpr):
    up, gate = load_both(joined, row, stride, columns, seen, WIDTH)
    return gate, up


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        (forward, "sigmoid", of_zero, [True, False, False]),
        (forward, "load_halves", swapped, [True, False, False]),
        (backward, "sigmoid", of_zero, [False, True, True]),
        (backward, "inner_slope", without_the_square, [False, True, False]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    assert [error > 1e-2 for error in relative_errors(normal(9, 46))] == wrong
