"""The programs of exact polynomial attention against the reference in float64, under Triton's interpreter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import first_always
from polysketch.ops import triton
from polysketch.ops.polynomial import polynomial_attention, polynomial_attention_backend
from polysketch.ops.polynomial.reference import reference_polynomial_attention
from polysketch.ops.polynomial.triton.launcher import WIDEST, triton_polynomial_attention


@dataclass(frozen=True)
class Case:
    """A call: shapes, options and the blocks that its programs work in."""

    queries: int = 37
    keys: int = 37
    heads: int = 2
    key_heads: int = 2
    batch: int = 1
    head_dim: int = 16
    value_dim: int = 16
    degree: int = 4
    scale: float = 0.5
    offset: float = 1.0
    first_position: int | None = 0
    missing: tuple[int, ...] = ()
    blocks: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        lengths = (self.queries, self.keys, self.keys, self.queries)
        widths = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        shapes = zip(heads, lengths, widths, strict=True)
        return [torch.randn(self.batch, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def options(self) -> dict:
        """What the backends take."""
        mask = torch.arange(self.keys) >= torch.tensor(self.missing)[:, None] if self.missing else None
        polynomial = {"degree": self.degree, "scale": self.scale, "offset": self.offset}
        return {**polynomial, "first_position": self.first_position, "key_mask": mask}


CASES = [
    Case(),
    Case(queries=1, keys=1, degree=2),
    Case(queries=16, keys=16, heads=4, batch=2, key_heads=1, degree=2, missing=(0, 5)),
    Case(queries=40, keys=23, first_position=None, head_dim=20, value_dim=9, heads=2, key_heads=1, degree=6),
    Case(queries=17, keys=50, first_position=33, missing=(40,), blocks=(16, 32), scale=-0.3, offset=0.5),
    Case(queries=50, keys=50, blocks=(32, 16), value_dim=33, degree=8, scale=0.25, heads=1, key_heads=1),
    Case(queries=33, keys=70, first_position=37, blocks=(16, 32), heads=3, key_heads=1, head_dim=7, value_dim=3),
    Case(queries=3, keys=40, first_position=None, missing=(7,), offset=0.0, degree=10, scale=0.1),
    Case(queries=48, keys=64, first_position=16, batch=2, missing=(20, 64), offset=0.0, heads=1, key_heads=1),
    Case(queries=2, keys=31, first_position=29, heads=4, key_heads=2, blocks=(32, 16), degree=14, scale=0.2),
    Case(queries=20, keys=70, first_position=3, heads=1, key_heads=1, degree=6, scale=0.25),
    Case(queries=20, keys=20, first_position=None, batch=2, heads=1, key_heads=1, missing=(20, 3), head_dim=40),
]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case: Case, tensors: list[Tensor], attend=triton_polynomial_attention) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    blocks = {"ROWS": case.blocks[0], "KEYS": case.blocks[1], "num_warps": 4, "num_stages": 2}
    programs = ("polynomial_forward", "polynomial_grad_query", "polynomial_grad_key_value")
    with triton.forced(**dict.fromkeys(programs, blocks)):
        output = attend(*leaves, **case.options())
        return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]


def exactly(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The reference in float64."""
    return run(case, [tensor.double() for tensor in tensors], reference_polynomial_attention)


def assert_agree(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, ours, truth in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert (ours.double() - truth).norm() <= tolerance * truth.norm().clamp(min=1e-3), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_the_reference_in_float64(case: Case) -> None:
    tensors = case.tensors()
    found = run(case, tensors)
    assert_agree(found, exactly(case, tensors), 2e-6 * case.degree)
    assert all(gradient.is_contiguous() for gradient in found[1:])


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5]], ids=str)
def test_half_precision_errs_by_its_own_rounding(case: Case) -> None:
    case = replace(case, dtype=torch.float16)
    tensors = case.tensors()
    found = run(case, tensors)
    assert all(tensor.dtype == torch.float16 for tensor in found)
    assert_agree(found, exactly(case, tensors), 2e-3)


def test_weights_that_leave_the_range_of_float16_do_no_harm() -> None:
    case = Case(dtype=torch.float16, degree=8, scale=2.0)
    tensors = case.tensors()
    assert (torch.einsum("bhid,bhjd->bhij", tensors[0], tensors[1]) * 2).double().pow(8).max() > 1e10
    assert_agree(run(case, tensors), exactly(case, tensors), 4e-3)


def test_where_one_weight_holds_nearly_all_of_the_mass_the_gradient_keeps_its_precision() -> None:
    """Its gradient is a difference that nearly cancels: an output in float16 would leave nothing of it."""
    case = Case(dtype=torch.float16, first_position=None, queries=16, keys=16, degree=8, heads=1, key_heads=1)
    query, key, value, gradient = case.tensors()
    key[:, :, 3] = query[:, :, :1].mean(2) * 2
    query = query * 0 + key[:, :, 3:4]
    tensors = [query, key, value, gradient]
    expected = exactly(case, tensors)
    assert (expected[0] - value[:, :, 3:4]).abs().max() < 0.02
    assert_agree(run(case, tensors), expected, 4e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of scores that no row sees
@pytest.mark.parametrize(("size", "degree", "offset"), [(2e3, 8, 1.0), (1e-5, 4, 0.0)])
def test_huge_and_tiny_sums_of_weights_keep_their_gradients(size: float, degree: int, offset: float) -> None:
    case = Case(degree=degree, offset=offset, queries=20, keys=20)
    query, key, value, gradient = case.tensors()
    tensors = [query * size, key * size**0.1, value, gradient]
    expected = exactly(case, tensors)
    found = run(case, tensors)
    assert all(tensor.isfinite().all() for tensor in found)
    for ours, truth in zip(found, expected, strict=True):
        assert (ours.double() - truth).norm() <= 1e-4 * truth.norm()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_overflowing_row_is_nan_and_no_other() -> None:
    case = Case(degree=8, scale=1.0)
    tensors = case.tensors()
    tensors[0][:, :, 20] *= 1e6
    output = run(case, tensors)[0]
    assert output[:, :, 20].isnan().all()
    assert output[:, :, :20].isfinite().all()
    assert output[:, :, 21:].isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_of_which_only_the_sum_overflows_is_nan_too_with_its_gradients() -> None:
    """Its numerator is finite, and over infinity it would be a wrong zero in silence."""
    case = Case(queries=2, keys=2, heads=1, key_heads=1, degree=8, scale=1.0, head_dim=1, value_dim=1)
    entry = torch.full((1, 1, 2, 1), 2e38 ** (1 / 16))
    output, *gradients = run(case, [entry, entry, torch.full_like(entry, 1e-3), torch.ones_like(entry)])
    torch.testing.assert_close(output[0, 0, 0], torch.tensor([1e-3]))
    assert output[0, 0, 1].isnan().all()
    assert all(gradient[0, 0, 1].isnan().all() for gradient in gradients)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_stands_in_the_padding_and_in_the_future_does_not_get_out() -> None:
    case = Case(missing=(5,), queries=40, keys=40, heads=1, key_heads=1)
    query, key, value, gradient = case.tensors()
    expected = run(case, [query, key, value, gradient])
    key[:, :, :5], value[:, :, :5] = torch.nan, torch.inf
    for ours, truth in zip(run(case, [query, key, value, gradient]), expected, strict=True):
        assert torch.equal(ours, truth)
    key[:, :, 30:] *= 1e20
    value[:, :, 30:] *= -7
    assert torch.equal(run(case, [query, key, value, gradient])[0][:, :, :30], expected[0][:, :, :30])


@pytest.mark.parametrize("offset", first_always([0.0, 1.0]))
def test_a_row_that_sees_no_key_gives_zeros_and_no_gradient(offset: float) -> None:
    case = Case(missing=(20,), offset=offset)
    output, grad_query, grad_key, grad_value = run(case, case.tensors())
    for tensor in (output, grad_query, grad_key, grad_value):
        assert tensor[:, :, :20].count_nonzero() == 0
        assert tensor[:, :, 20:].count_nonzero() > 0


def test_strides_do_not_matter() -> None:
    case = Case(queries=5, keys=5, key_heads=1)
    tensors = case.tensors()
    expected = run(case, tensors)
    interleaved = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    wide = [torch.nn.functional.pad(tensor, (3, 2), value=torch.nan)[..., 3:-2] for tensor in tensors]
    turned = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in tensors]
    for strided in (interleaved, wide, turned):
        assert not strided[0].is_contiguous()
        for ours, truth in zip(run(case, strided), expected, strict=True):
            assert torch.equal(ours, truth)
    expanded = [*tensors[:3], tensors[3][:, :, :1, :1].expand(tensors[3].shape)]
    assert_agree(run(case, expanded), exactly(case, expanded), 1e-5)


def test_the_last_queries_over_a_cache_give_the_last_rows_of_the_whole() -> None:
    case = Case(queries=45, keys=45, heads=1, key_heads=1)
    query, key, value, gradient = case.tensors()
    whole = run(case, [query, key, value, gradient])[0]
    for count in (1, 20):
        part = replace(case, queries=count, first_position=45 - count)
        last = run(part, [query[:, :, -count:], key, value, gradient[:, :, -count:]])[0]
        torch.testing.assert_close(last, whole[:, :, -count:])


@pytest.mark.parametrize("empty", [{"queries": 0, "keys": 9}, {"queries": 9, "keys": 0}, {"batch": 0}])
def test_no_query_or_no_key_is_no_error(empty: dict) -> None:
    case = Case(**empty, first_position=None)
    for tensor in run(case, case.tensors()):
        assert tensor.count_nonzero() == 0


# As an operator and as a backend.


@pytest.mark.parametrize(
    "case", first_always([Case(queries=3, keys=6, first_position=None), Case(queries=5, keys=5, missing=(1,))])
)
def test_the_operators_pass_opcheck(case: Case) -> None:
    tensors, options = case.tensors(), case.options()
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    numbers = (case.degree, case.scale, case.offset, case.first_position)
    operator = torch.ops.polysketch.polynomial_attention_triton.default
    torch.library.opcheck(operator, (query, key, value, options["key_mask"], *numbers, True))
    saved = [tensor.detach() for tensor in (query, key, value)]
    outputs = [tensor.detach() for tensor in operator(query, key, value, options["key_mask"], *numbers, True)]
    arguments = (tensors[3], *saved, options["key_mask"], *outputs, case.degree, case.scale, case.first_position)
    torch.library.opcheck(torch.ops.polysketch.polynomial_attention_triton_backward.default, arguments)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_it_compiles_without_a_graph_break_and_with_its_gradient() -> None:
    tensors = Case(queries=20, keys=20).tensors()

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return polynomial_attention(query, key, value, causal=True, backend="triton").square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    for actual, reference in zip(*results, strict=True):
        torch.testing.assert_close(actual, reference)


def test_operations_are_those_of_the_blockwise_backend() -> None:
    inputs = [tensor.requires_grad_() for tensor in Case(queries=10, keys=10, value_dim=3).tensors()[:3]]
    counts = []
    for backend in ("blockwise", "triton"):
        with FlopCounterMode(display=False) as counter:
            polynomial_attention(*inputs, causal=True, backend=backend).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_inputs_of_several_dtypes_meet_in_the_wider_one() -> None:
    query, key, value, _ = Case().tensors()
    expected = polynomial_attention(query, key, value.half().float(), backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = polynomial_attention(query, key, value.half(), backend="triton")
    assert found.dtype == torch.float16
    assert torch.equal(found, expected.half())


def test_it_is_refused_with_the_reason_where_it_cannot_run_and_never_picked_off_cuda() -> None:
    query, key, value, _ = Case().tensors()
    assert polynomial_attention_backend(query, key, value, backend="triton") == "triton"
    assert polynomial_attention_backend(query, key, value) != "triton"
    with pytest.raises(RuntimeError, match=r"got torch\.float64"):
        polynomial_attention(query.double(), key.double(), value.double(), backend="triton")
    wide = value[..., :1].expand(*value.shape[:3], WIDEST + 1)
    with pytest.raises(RuntimeError, match="vectors of up to 128, got one of 129"):
        polynomial_attention(query, key, wide, backend="triton")
