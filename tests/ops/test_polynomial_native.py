"""The native program of exact polynomial weights: output and gradients of the reference, and where "auto" takes it."""

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import first_always
from ops.linear_cases import relative_error
from polysketch import ops
from polysketch.ops.native import build, pairs, why_unavailable
from polysketch.ops.polynomial import native, polynomial_attention_backend

SOURCE = Path(build.__file__).parent / "source"
pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _every_call_is_worth_its_threads(monkeypatch):
    monkeypatch.setattr(pairs, "_PRODUCTS_WORTH_A_THREAD", 0)


@dataclass(frozen=True)
class Case:
    """What a call is made of.

    Attributes:
        later: keys more than queries, of a cache where it is causal.
        degree: of a power; None for the square of a polynomial of degree 3.
        masked: of three rows the second begins late and has holes, and the third is masked altogether.
    """

    length: int = 100
    later: int = 0
    causal: bool = True
    block_size: int | None = None
    degree: int | None = 4
    heads: int = 2
    key_heads: int = 2
    head_dim: int = 12
    value_dim: int = 12
    offset: float = 0.5
    masked: bool = False


SHAPES = [
    {"length": 1},
    {"length": 33, "masked": True},
    {"length": 64, "heads": 4, "value_dim": 5},
    {"length": 97, "causal": False, "heads": 6, "value_dim": 33},
    {"length": 40, "later": 75, "masked": True},
    {"length": 40, "later": 75, "causal": False, "heads": 3, "key_heads": 1},
    {"length": 170, "later": -75, "causal": False, "masked": True},
    {"length": 300, "heads": 1, "key_heads": 1, "head_dim": 64, "value_dim": 64},
    {"length": 301, "heads": 3, "key_heads": 1, "masked": True, "offset": 0.0},
    {"length": 300, "block_size": 7, "heads": 1, "key_heads": 1, "masked": True},
    {"length": 130, "later": 20, "block_size": 500},
]
CASES = [Case(**shape, degree=degree) for shape in SHAPES for degree in (4, None)]
CASES += [Case(length=150, degree=degree, masked=True) for degree in (2, 6, 14)]


def make(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value and, if there are any, coefficients, in float64; the mask."""
    generator = torch.Generator().manual_seed(0)
    keys = case.length + case.later
    shapes = [(case.heads, case.length, case.head_dim), (case.key_heads, keys, case.head_dim)]
    shapes += [(case.key_heads, keys, case.value_dim)]
    tensors = [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[:2] = [0.6 * F.layer_norm(x, (case.head_dim,)) for x in tensors[:2]]
    if case.degree is None:
        tensors.append(torch.tensor([0.4, -0.3, 0.2, 0.1], dtype=torch.float64))
    if not case.masked:
        return tensors, None
    mask = torch.arange(keys) >= torch.tensor([0, min(5, keys - 1), keys])[:, None]
    mask[1, keys // 2 :: 3] = False
    return tensors, mask


def attend(case: Case, tensors: list[Tensor], mask: Tensor | None, backend: str = "native") -> Tensor:
    options = {"offset": case.offset, "block_size": case.block_size, "key_mask": mask, "backend": backend}
    cached = case.causal and case.later
    if not cached:
        options["causal"] = case.causal
    if case.degree is None:
        function = ops.squared_polynomial_attention_with_cache if cached else ops.squared_polynomial_attention
        return function(*tensors, **options)
    function = ops.polynomial_attention_with_cache if cached else ops.polynomial_attention
    return function(*tensors, **options, degree=case.degree, scale=0.7)


def with_gradients(case: Case, tensors: list[Tensor], mask: Tensor | None, backend: str = "native") -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attend(case, leaves, mask, backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_all_agree(cases: list[Case]) -> None:
    for case in cases:
        assert_agrees(case)


def assert_agrees(case: Case) -> None:
    tensors, mask = make(case)
    expected = with_gradients(case, tensors, mask, "reference")
    found = with_gradients(case, [x.float() for x in tensors], mask)
    for name, actual, reference in zip(("output", "query", "key", "value", "terms"), found, expected, strict=False):
        assert actual.isfinite().all(), f"{case}: {name}: relative error infinite"
        error = relative_error(actual, reference)
        # Gradients of coefficients are sums that nearly cancel: PyTorch's operations in float32 err as much.
        assert error < (2e-5 if name == "terms" else 3e-6), f"{case}: {name}: relative error {error:.1e}"


@pytest.mark.parametrize("spans", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_the_reference(case, spans, monkeypatch):
    monkeypatch.setattr(native, "_num_spans", lambda *_: spans)
    assert_agrees(case)


def test_what_is_masked_may_be_anything():
    case = Case(masked=True)
    tensors, mask = make(case)
    tensors = [x.float() for x in tensors]
    expected = with_gradients(case, tensors, mask)
    for x in tensors[1:3]:
        x.masked_fill_(~mask[:, None, :, None], float("nan"))
    for found, right in zip(with_gradients(case, tensors, mask), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_the_past_does_not_see_the_future():
    case = Case(length=200)
    tensors, _ = make(case)
    tensors = [x.float() for x in tensors]
    before = attend(case, tensors, None)
    for x in tensors[1:]:
        x[:, :, 120:] = 1e3
    after = attend(case, tensors, None)
    assert torch.equal(before[:, :, :120], after[:, :, :120])
    assert not torch.equal(before[:, :, 120:], after[:, :, 120:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    case = Case(length=70)
    tensors, _ = make(case)
    tensors = [x.to(dtype) for x in tensors]
    found = with_gradients(case, tensors, None)
    options = {"degree": 4, "scale": 0.7, "offset": 0.5, "first_position": 0, "key_mask": None}
    single = native.native_polynomial_attention(*(x.float() for x in tensors), **options)
    assert torch.equal(found[0], single.to(dtype))
    assert all(x.dtype == dtype for x in found)


@pytest.mark.parametrize("degree", [4, 8])
def test_denominators_near_the_end_of_float32_keep_their_gradients(degree):
    """A query's weights of 1e36: their powers of one degree less, times gradients, would overflow or vanish."""
    size = 1e36 ** (1 / degree) / 8**0.5
    case = Case(length=40, degree=degree, offset=1.0, head_dim=8, heads=1, key_heads=1)
    tensors, _ = make(case)
    tensors[0] *= size / 0.7
    expected = with_gradients(case, tensors, None, "reference")
    found = with_gradients(case, [x.float() for x in tensors], None)
    for actual, reference in zip(found, expected, strict=True):
        assert reference.abs().max() > 0
        assert relative_error(actual, reference) < 1e-4


def test_degrees_whose_denominators_float32_does_not_hold_are_not_taken():
    x = 0.7 * make(Case())[0][0].float()
    with pytest.raises(RuntimeError, match="degrees of up to 60, got 62"):
        ops.polynomial_attention(x, x, x, degree=62, backend="native")
    expected = ops.polynomial_attention(x, x, x, degree=62, backend="blockwise")
    assert expected.abs().max() > 0.1
    assert torch.equal(ops.polynomial_attention(x, x, x, degree=62), expected)


def test_a_row_without_weight_has_neither_output_nor_gradients():
    tensors, _ = make(Case(length=20, offset=0.0))
    tensors = [(1e-12 * tensors[0]).float(), *(x.float() for x in tensors[1:])]
    for found in with_gradients(Case(length=20, offset=0.0), tensors, None):
        assert not found.any()


def test_the_operator_refuses_queries_that_stand_elsewhere():
    x = torch.randn(1, 2, 20, 8)
    with pytest.raises(ValueError, match="queries at the end of the keys, from 0 on, got 3"):
        torch.ops.polysketch.polynomial_attention_native(x, x, x, None, None, 4, 1.0, 1.0, 3, 1)


@pytest.mark.parametrize("degree", [4, None])
def test_a_row_that_overflows_is_nan_and_no_other(degree):
    case = Case(length=40, degree=degree, heads=1, key_heads=1)
    tensors, _ = make(case)
    tensors = [x.float() for x in tensors]
    tensors[0][:, :, 11] = 1e20
    output = attend(case, tensors, None)
    assert output[:, :, 11].isnan().all()
    assert output[:, :, [*range(11), *range(12, 40)]].isfinite().all()


@pytest.mark.parametrize(
    ("degree", "dtype"),
    first_always(
        [(4, torch.float32), (None, torch.bfloat16), (4, torch.bfloat16), (None, torch.float32)], 2, several=True
    ),
)
def test_it_is_an_operator(degree, dtype):
    case = Case(length=40, degree=degree, masked=True, heads=4)
    tensors, mask = make(case)
    query, key, value = (x.to(dtype).requires_grad_() for x in tensors[:3])
    terms = [x.float().requires_grad_() for x in tensors[3:]]
    weights = (terms[0] if terms else None, degree or 0, 0.8, 1.0, 0, 3)
    operator = torch.ops.polysketch.polynomial_attention_native
    torch.library.opcheck(operator.default, (query, key, value, mask, *weights))
    plain = [x.detach() for x in (query, key, value)]
    coefficients = terms[0].detach() if terms else None
    output, denominator = operator(*plain, mask, coefficients, *weights[1:])
    backward = torch.ops.polysketch.polynomial_attention_native_backward.default
    given = (output, denominator, *plain, mask, coefficients, denominator, degree or 0, 0.8, 0, 3)
    for with_terms in {bool(terms), False}:
        torch.library.opcheck(backward, (*given, with_terms))


def test_the_operators_denominator_is_differentiable_too():
    query, key, value = (x.float().requires_grad_() for x in make(Case(length=20))[0])
    operator = torch.ops.polysketch.polynomial_attention_native
    _, denominator = operator(query, key, value, None, None, 4, 0.7, 0.5, 0, 1)
    found = torch.autograd.grad(denominator.square().mean(), (query, key))
    weights = (0.7 * query.double() @ key.double().mT).tril() ** 4
    expected = torch.autograd.grad((0.5 + weights.sum(-1)).square().mean(), (query, key))
    for actual, reference in zip(found, expected, strict=True):
        assert relative_error(actual, reference) < 1e-6


@pytest.mark.parametrize("degree", [4, None])
def test_it_compiles_without_a_graph_break_and_with_its_gradient(degree):
    case = Case(length=70, degree=degree, masked=True)
    tensors, mask = make(case)
    leaves = [x.float().requires_grad_() for x in tensors]

    def loss(*leaves: Tensor) -> Tensor:
        return attend(case, leaves, mask).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for actual, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize("case", [Case(), Case(causal=False), Case(later=9, block_size=7)], ids=str)
def test_operations_are_counted_for_the_pairs_that_are_seen(case):
    tensors = [x.float() for x in make(case)[0]]
    own, seen = range(case.later, case.length + case.later), 0
    block = case.block_size or 1
    for i, position in enumerate(own):
        last = min(position - i % block + block, own.stop) if case.causal else own.stop
        seen += last
    with FlopCounterMode(display=False) as counter:
        attend(case, tensors, None)
    assert counter.get_total_flops() == 2 * 3 * case.heads * seen * (case.head_dim + case.value_dim)


def test_auto_takes_it_for_many_queries_in_float32_or_less():
    x, one = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 1, 8)
    assert polynomial_attention_backend(x, x) == polynomial_attention_backend(x.bfloat16(), x.bfloat16()) == "native"
    assert polynomial_attention_backend(one, x) == polynomial_attention_backend(x.double(), x.double()) == "blockwise"
    assert polynomial_attention_backend(one, one) == "reference"
    with pytest.raises(RuntimeError, match=r"takes float32, bfloat16 and float16, got torch\.float64"):
        ops.polynomial_attention(x.double(), x.double(), x.double(), backend="native")
    with pytest.raises(RuntimeError, match=r"takes float32, bfloat16 and float16, got torch\.float64"):
        ops.squared_polynomial_attention(x.double(), x.double(), x.double(), (1.0, 1.0), backend="native")


PAIRS, GRADIENTS = "seen_pairs.h", "pairs_backward.h"
HEADER, FORWARD, BACKWARD = (f"polynomial_attention{name}" for name in (".h", ".cpp", "_backward.cpp"))
MUTANTS = {
    "no causal mask": (PAIRS, "(ages >= static_cast<int32_t>(-ahead))", "(ages >= static_cast<int32_t>(-ahead) - 1)"),
    "the mask is forgotten": (PAIRS, "if (!span.is_real(key + j)) {", "if (false) {"),
    "no offset": (FORWARD, "std::fill(block.mass, block.mass + kQueries, call_.offset)", "zero(block.mass, kQueries)"),
    "no scale": (FORWARD, "load(block.query + i) * call_.scale", "load(block.query + i)"),
    "a third power where there are four": (HEADER, "return (x * x) * (x * x);", "return x * x * x;"),
    "no degree in the gradient": (HEADER, " * static_cast<float>(degree_));", ");"),
    "the remainder of a denominator is forgotten": (HEADER, "exponent - degree_ * shrink)", "exponent)"),
    "a term of the slope too many": (HEADER, "i > 0; i--) slope", "i >= 0; i--) slope"),
    "the slope is not divided": (HEADER, "change * (slope * shrink)", "change * slope"),
    "moments are not divided": (HEADER, "add_moments(x, change * shrink)", "add_moments(x, change)"),
    "what is not seen has the constant's weight": (BACKWARD, "if (!Weights::kZeroOfZero) hide", "if (false) hide"),
    "no term of the row": (BACKWARD, "load(changes + i) - load(term_ + v)", "load(changes + i)"),
    "no scale in the gradient of queries": (GRADIENTS, "*= of_query_[t];", "*= 1.0f;"),
    "queries of the next span are forgotten": (
        GRADIENTS,
        "if (!own && !owned.count()) continue;",
        "if (!own) continue;",
    ),
    "the later span is left out": (FORWARD, "spans - 1 - number, spans).run();", "number, spans).run();"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_num_spans", lambda *_: 2)
    file, old, new = MUTANTS[name]
    cases = [case for case in CASES if case.length > 90]
    assert_all_agree(cases)
    source = tmp_path / "source"
    source.mkdir()
    for path in (*SOURCE.glob("*.h"), SOURCE / FORWARD, SOURCE / BACKWARD):  # the other programs take long to compile
        shutil.copy(path, source)
    text = (source / file).read_text()
    assert text.count(old) == 1
    (source / file).write_text(text.replace(old, new))
    broken = ctypes.CDLL(str(build.compiled(source, tmp_path)))
    monkeypatch.setattr(native, "library", lambda: broken)
    with pytest.raises(AssertionError, match="relative error"):
        assert_all_agree(cases)
