"""The programs of a sliding window under Triton's interpreter, against the definition in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import triton as compiler
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import first_always
from polysketch import ops
from polysketch.attention import PolysketchAttention, SlidingWindowAttention
from polysketch.ops.triton import configurations, forced, self_check
from polysketch.ops.window import api
from polysketch.ops.window import self_check as window_check
from polysketch.ops.window.triton.programs import backward, forward
from polysketch.ops.window.triton.programs.bounds import real_keys as real_of_mask
from polysketch.ops.window.triton.programs.bounds import seen_of as seen_within

PROGRAMS = ["window_forward", "window_grad_query", "window_grad_key_value"]
SMALL = {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1}
NAMES = ("output", "query", "key", "value", "logit", "beside")


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """More than one tile of everything; what a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def programs_on_a_cpu(tmp_path, monkeypatch):
    """A CPU that "auto" of this op takes for a device of the programs; it has asked nothing yet, and asks less."""
    for name, size in {"_LENGTH": 50, "_WINDOW": 20, "_BLOCK": 18}.items():
        monkeypatch.setattr(window_check, name, size)
    monkeypatch.setattr(self_check, "_file", lambda: tmp_path / "self_check.json")
    monkeypatch.setattr(self_check, "_answers", {})
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


@dataclass(frozen=True)
class Case:
    """What a call is made of.

    Attributes:
        earlier: keys before the first query, as of a cache; causal only.
        size: of the logits, which are normal; of the key beside too.
        masked: of three rows the second begins late and has holes, and the third is masked altogether.
        beside: one key beside for two queries of three, of logit minus infinity for the third.
        block: tokens of a block, None for causal order inside of it too.
    """

    length: int = 50
    window: int = 20
    causal: bool = True
    heads: int = 1
    key_heads: int = 1
    head_dim: int = 12
    value_dim: int = 12
    earlier: int = 0
    size: float = 1.0
    masked: bool = False
    beside: bool = False
    block: int | None = None


CASES = [
    Case(length=50, heads=2, beside=True),
    Case(length=20, window=9, heads=4, key_heads=2, head_dim=20, value_dim=13, masked=True, beside=True),
    Case(length=21, window=9, earlier=40, masked=True),  # the first keys are seen by none
    Case(length=35, window=9, causal=False, masked=True, beside=True),
    Case(length=45, window=500, beside=True),
    Case(length=50, window=17, block=6, masked=True, beside=True),
    Case(length=1, window=1, beside=True),
    Case(length=1, window=300, earlier=50, heads=2, masked=True, beside=True),
    Case(length=3, window=8, earlier=7),
    Case(length=33, window=1, masked=True),
    Case(length=40, window=500, causal=False),
    Case(length=65, window=16, head_dim=1, value_dim=1),
    Case(length=17, window=16, head_dim=64, value_dim=128, beside=True),
    Case(length=40, window=30, size=25.0, beside=True),  # logits of up to 80, and beyond
    Case(length=33, window=7, heads=3, masked=True, beside=True),
    Case(length=70, window=37, heads=4, key_heads=2, masked=True, beside=True),
    Case(length=20, window=40, earlier=30, block=8, heads=2),
    Case(length=48, window=33, block=100),
]


def make(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value and, if there is one, logit and value of the key beside, in float64; the mask."""
    generator = torch.Generator().manual_seed(0)
    keys = case.length + case.earlier
    shapes = [(case.heads, case.length, case.head_dim), (case.key_heads, keys, case.head_dim)]
    shapes += [(case.key_heads, keys, case.value_dim)]
    shapes += [(case.heads, case.length), (case.heads, case.length, case.value_dim)] * case.beside
    rows = 3 if case.masked else 1
    tensors = [torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[0] *= case.size
    if case.beside:
        tensors[3] = tensors[3] * case.size + 1.0
        tensors[3][:, :, 1::3] = float("-inf")
    if not case.masked:
        return tensors, None
    mask = torch.arange(keys) >= torch.tensor([0, min(5, keys - 1), keys])[:, None]
    mask[1, keys // 2 :: 3] = False
    return tensors, mask


def attend(case: Case, tensors: list[Tensor], mask: Tensor | None, backend: str = "triton") -> Tensor:
    function = ops.sliding_window_attention_with_cache if case.earlier else ops.sliding_window_attention
    causal = {} if case.earlier else {"causal": case.causal}
    options = {"window": case.window, "block_size": case.block, "scale": 0.3, "backend": backend, **causal}
    beside = ops.BesideKey(tensors[3], tensors[4]) if case.beside else None
    return function(*tensors[:3], key_mask=mask, beside=beside, **options)


def output_and_gradients(case: Case, tensors: list[Tensor], mask: Tensor | None, backend="triton") -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attend(case, leaves, mask, backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def errors(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Of output and every gradient in `dtype` against the definition in float64: by the norm, or what zeros became."""
    tensors, mask = make(case)
    rounded = [x.to(dtype) for x in tensors]
    found = output_and_gradients(case, rounded, mask)
    expected = output_and_gradients(case, [x.double() for x in rounded], mask, "reference")
    assert {x.dtype for x in found} == {dtype}
    pairs = zip(NAMES, found, expected, strict=False)
    # max() would pass over what is not a number
    wrong = {name: (a - b).norm() / b.norm() if b.any() else a.abs().max() for name, a, b in pairs}
    return {name: error.nan_to_num(math.inf).item() for name, error in wrong.items()}


def assert_exact(case: Case, tolerance: float = 2e-6, dtype: torch.dtype = torch.float32) -> None:
    found = errors(case, dtype)
    assert max(found.values()) < tolerance * max(1.0, case.size), found


@pytest.mark.parametrize("case", first_always(CASES, 6), ids=str)
def test_output_and_gradients_are_those_of_the_definition_in_float64(case):
    assert_exact(case)


@pytest.mark.parametrize("case", first_always(CASES), ids=str)
def test_half_precision_errs_by_its_own_rounding(case):
    assert_exact(case, 2e-3, torch.float16)


def test_the_shipped_configurations_agree_with_the_definition(monkeypatch):
    monkeypatch.setattr(configurations, "_forced", {})
    assert_exact(Case(length=200, window=140, beside=True))


def float32(case: Case) -> tuple[list[Tensor], Tensor | None]:
    tensors, mask = make(case)
    return [x.float() for x in tensors], mask


@pytest.mark.full
def test_the_same_call_gives_the_same_bits():
    case = Case(length=20, heads=2, beside=True)
    first, second = (output_and_gradients(case, *float32(case)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_any_strides_give_the_same_bits():
    case = Case(length=9, heads=2, masked=True, beside=True)
    tensors, mask = float32(case)
    expected = output_and_gradients(case, tensors, mask)
    between = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    inside = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in tensors]
    part = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in tensors]
    masks = [mask.mT.contiguous().mT, torch.cat([mask, mask], 1)[:, : mask.shape[1]], mask]
    for given, hidden in zip((between, inside, part), masks, strict=True):
        assert given[0].stride() != tensors[0].stride()
        found = output_and_gradients(case, given, hidden)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_gradient_that_one_number_stands_for_is_read_as_it_lies():
    """As of a sum: strides of zero."""
    case = Case(length=20, beside=True)
    tensors, mask = float32(case)
    found, expected = [], []
    for results, backend, dtype in ((found, "triton", torch.float32), (expected, "reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        results += torch.autograd.grad(attend(case, leaves, mask, backend).sum(), leaves)
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)) < 2e-6


def test_a_query_without_a_key_gets_zeros_and_a_gradient_of_zeros():
    case = Case(length=20, masked=True, beside=True)
    tensors, mask = float32(case)
    output, of_query, *_ = output_and_gradients(case, tensors, mask)
    assert output[1, :, 1].eq(0).all()  # before its row's first token, and its key beside is none
    assert of_query[1, :, :5].eq(0).all()
    assert torch.equal(output[2, :, 0], tensors[4][2, :, 0])  # the only key it has


def test_what_stands_at_masked_tokens_is_not_read():
    case = Case(length=12, heads=2, masked=True, beside=True)
    tensors, mask = float32(case)
    spoiled = [x.clone() for x in tensors]
    for x in spoiled[1:3]:
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    found, expected = (output_and_gradients(case, x, mask) for x in (spoiled, tensors))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value")  # an infinite logit there
@pytest.mark.parametrize("changed", first_always([33, 1, 16, 49], 1))
def test_later_tokens_change_nothing_before_them_however_large(changed):
    case = Case(beside=True)
    tensors, _ = float32(case)
    before = attend(case, tensors, None)[:, :, :changed]
    for x, factor in zip(tensors, (-3.0, 1e20, -3.0, -3.0, -3.0), strict=True):
        x[:, :, changed:] *= factor
    assert torch.equal(attend(case, tensors, None)[:, :, :changed], before)


@pytest.mark.parametrize("where", first_always(["query", "logit", "key"]))
def test_what_is_no_number_stays_none_where_it_is_seen_and_nowhere_else(where):
    query, key = torch.randn(2, 1, 1, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    value, logit = torch.randn(1, 1, 40, 8), torch.zeros(1, 1, 40)
    {"query": query, "key": key, "logit": logit}[where][0, 0, 11] = float("nan")
    case = Case(length=40, window=3, head_dim=8, value_dim=8, beside=True)
    given = [query, key, value, logit, torch.ones_like(value)]
    found, expected = (attend(case, given, None, backend) for backend in ("triton", "reference"))
    assert expected[0, 0, 11].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_key_beside_may_be_of_another_dtype():
    """Its gradients have it too."""
    case = Case(length=20, beside=True)
    tensors, mask = float32(case)
    given = [*(x.half() for x in tensors[:3]), *tensors[3:]]
    found = output_and_gradients(case, given, mask)
    expected = output_and_gradients(case, [x.double() for x in given], mask, "reference")
    assert [x.dtype for x in found] == [torch.float16] * 4 + [torch.float32] * 2
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)) < 2e-3


def test_autocast_decides_what_is_computed_in():
    tensors, _ = float32(Case(length=20))
    with torch.autocast("cpu", torch.float16):
        found = attend(Case(length=20), tensors, None)
    assert found.dtype == torch.float16
    assert torch.equal(found, attend(Case(length=20), [x.half() for x in tensors], None))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="no bfloat16 products"):
        attend(Case(length=20), tensors, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: (x.bfloat16(), x.bfloat16()), "no bfloat16 products"),
        (lambda x: (x.double(), x.double()), r"got torch\.float64"),
        (lambda x: (torch.ones(1, 1, 4, 129), torch.ones(1, 1, 4, 8)), "got 129 and 8"),
        (lambda x: (x, torch.ones(1, 1, 4, 0)), "got 8 and 0"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(change, reason):
    query, value = change(torch.ones(1, 1, 4, 8))
    with pytest.raises(RuntimeError, match=reason):
        ops.sliding_window_attention(query, query, value, window=2, backend="triton")


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    x = torch.ones(1, 1, 4, 8)
    assert ops.sliding_window_attention_backend(x, x, x, backend="triton") == "triton"
    assert ops.sliding_window_attention_backend(x, x, x) != "triton"


def test_no_rows_are_no_work():
    x = torch.ones(0, 2, 5, 8)
    assert ops.sliding_window_attention(x, x, x, window=2, backend="triton").shape == (0, 2, 5, 8)


@pytest.mark.full  # the same operator passes opcheck in tests/ops
@pytest.mark.parametrize(
    "case", first_always([Case(length=5, masked=True, beside=True), Case(length=9, earlier=30)]), ids=str
)
def test_it_is_an_operator(case):
    tensors, mask = float32(case)
    if mask is not None:  # of a row with holes
        tensors, mask = [x[1:2] for x in tensors], mask[1:2]
    arguments = [*tensors[:3], mask, *(tensors[3:] or (None, None)), 19, 0, 0.3, 0, "triton"]
    differentiable = [x if x is None or not x.is_floating_point() else x.requires_grad_() for x in arguments[:6]]
    torch.library.opcheck(torch.ops.polysketch.window_attention.default, (*differentiable, *arguments[6:]))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    outputs = torch.ops.polysketch.window_attention(*plain)
    backward_operator = torch.ops.polysketch.window_attention_backward.default
    shapes = ("test_schema", "test_faketensor")
    torch.library.opcheck(backward_operator, (torch.randn_like(outputs[0]), list(outputs), *plain), test_utils=shapes)


def test_operations_are_counted_for_the_keys_that_are_seen():
    case = Case()
    with FlopCounterMode(display=False) as counter:
        attend(case, *float32(case))
    seen = sum(min(i + 1, case.window) for i in range(case.length))
    assert counter.get_total_flops() == 2 * seen * (case.head_dim + case.value_dim)


def test_one_compiled_graph_takes_every_length(programs_on_a_cpu):
    """Also where the window is longer than the sequence."""
    case, graphs = Case(window=9, beside=True), []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda *given: attend(case, given, None, "auto"), fullgraph=True, dynamic=True, backend=counted
    )
    for length in (20, 33, 6):
        tensors, _ = float32(Case(length=length, beside=True))
        assert torch.equal(compiled(*tensors), attend(case, tensors, None))
    assert len(graphs) == 1
    assert "polysketch.window_attention" in graphs[0].code


MECHANISMS = {
    "polysketch": lambda: PolysketchAttention(2, 12, 1, window=9, sketch_size=4),
    "sliding-window": lambda: SlidingWindowAttention(2, 12, 1, window=9),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_mechanism_gives_the_same_by_the_programs_as_without(name, monkeypatch, programs_on_a_cpu, launched):
    torch.manual_seed(0)
    mechanism = MECHANISMS[name]()
    # As a layer hands them over: tokens before heads in memory.
    given = [torch.randn(2, 37, heads, 12).transpose(1, 2) for heads in (2, 1, 1)]

    def attended() -> list[Tensor]:
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in given]
        output = mechanism(*leaves)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        return [output.detach(), *torch.autograd.grad(output, [*leaves, *mechanism.parameters()], cotangent)]

    found = attended()
    assert launched == PROGRAMS * 2  # after what compares them with the definition
    assert [f"beside={name == 'polysketch'} " in key for _, key in self_check._answers] == [True]
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    launched.clear()
    expected = attended()
    assert launched == []
    share = [
        ((a - b).norm() / (b.norm() or 1.0)).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)
    ]
    assert max(share) < 1e-5
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_decoding_by_the_programs_gives_the_rows_of_the_whole(programs_on_a_cpu, launched):
    case = Case(length=40, beside=True)
    tensors, mask = float32(case)
    whole = attend(case, tensors, mask)
    launched.clear()
    query, logit, beside = (tensors[i][:, :, 30:] for i in (0, 3, 4))
    key, value = (x[:, :, 30 - case.window + 1 :].repeat(2, 1, 1, 1) for x in tensors[1:3])
    options = {"window": case.window, "scale": 0.3, "key_rows": torch.tensor([1])}
    found = ops.sliding_window_attention_with_cache(
        query, key, value, **options, beside=ops.BesideKey(logit, beside), backend="auto"
    )
    assert launched == ["window_forward"] * 2  # the first of them compares it with the definition
    torch.testing.assert_close(found, whole[:, :, 30:])


def test_programs_that_disagree_are_named_and_the_call_goes_on_without(programs_on_a_cpu, monkeypatch):
    case = Case(length=20, beside=True)
    tensors, mask = float32(case)
    monkeypatch.setattr(forward, "seen_of", one_too_many)
    with pytest.warns(UserWarning, match="disagree with plain PyTorch.*window_attention"):
        found = attend(case, tensors, mask, "auto")
    assert torch.equal(found, attend(case, tensors, mask, "blockwise"))


def test_an_exported_graph_has_no_program(programs_on_a_cpu):
    mechanism = SlidingWindowAttention(2, 12, window=9).eval()
    inputs = tuple(torch.randn(1, 2, 20, 12) for _ in range(3))
    graph = str(torch.export.export(mechanism, inputs).graph)
    assert "triton" not in graph
    assert api.sliding_window_attention_backend(*inputs) == "triton"


@compiler.jit
def one_too_many(rows, earlier, behind, ahead, block, BLOCKS: tl.constexpr):
    oldest, newest = seen_within(rows, earlier, behind, ahead, block, BLOCKS)
    return oldest - 1, newest


@compiler.jit
def without_order(rows, earlier, behind, ahead, block, BLOCKS: tl.constexpr):
    oldest, newest = seen_within(rows, earlier, behind, ahead, block, BLOCKS)
    return oldest, newest + 1


@compiler.jit
def without_blocks(rows, earlier, behind, ahead, block, BLOCKS: tl.constexpr):
    return seen_within(rows, earlier, behind, ahead, block, False)


@compiler.jit
def without_a_mask(key_mask, start, end, KEYS: tl.constexpr):
    return real_of_mask(None, start, end, KEYS)


EVERYTHING = Case(length=20, window=9, block=6, masked=True, beside=True)


def _named(kernel) -> str:
    return kernel.fn.__name__


@pytest.mark.parametrize("broken", [one_too_many, without_order, without_blocks, without_a_mask], ids=_named)
@pytest.mark.parametrize("module", first_always([backward, forward]), ids=["backward", "forward"])
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, broken, monkeypatch):
    name = "real_keys" if broken is without_a_mask else "seen_of"
    monkeypatch.setattr(module, name, broken)
    wrong = {name for name, error in errors(EVERYTHING).items() if error > 1e-2}
    assert wrong == (set(NAMES) if module is forward else {"query", "key", "value"})
