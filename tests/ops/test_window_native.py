"""The native program of a sliding window: output and gradients of the reference, and what its memory may do wrong."""

import ctypes
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ops.linear_cases import relative_error
from polysketch import ops
from polysketch.ops.native import build, pairs, why_unavailable
from polysketch.ops.window import native

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
        earlier: keys before the first query, as of a cache; causal only.
        size: of the logits, which are normal; of the key beside too.
        masked: of three rows the second begins late and has holes, and the third is masked altogether.
        beside: one key beside for two queries of three, of logit minus infinity for the third.
    """

    length: int = 100
    window: int = 20
    causal: bool = True
    heads: int = 2
    key_heads: int = 2
    head_dim: int = 12
    value_dim: int = 12
    earlier: int = 0
    size: float = 1.0
    masked: bool = False
    beside: bool = False


CASES = [
    Case(length=1, window=1, beside=True),
    Case(length=1, window=300, earlier=290, heads=4, masked=True, beside=True),
    Case(length=1, window=40, earlier=75),
    Case(length=3, window=8, earlier=7, masked=True),
    Case(length=40, window=9, earlier=75),  # the first keys are seen by none
    Case(length=33, window=1, masked=True),
    Case(length=64, window=64, heads=4, value_dim=5),
    Case(length=65, window=500, causal=False, masked=True, beside=True),
    Case(length=97, window=33, causal=False, heads=6, value_dim=33),
    Case(length=300, window=32, heads=1, key_heads=1, head_dim=64, value_dim=64, beside=True),
    Case(length=301, window=7, heads=3, key_heads=1, masked=True, beside=True),
    Case(length=300, window=20, causal=False, heads=1, key_heads=1, masked=True),
    Case(length=450, window=140, heads=1, key_heads=1, masked=True, beside=True),  # rows of keys are moved in memory
    Case(length=700, window=40, causal=False, heads=2, key_heads=1, earlier=0, value_dim=70, beside=True),
    Case(length=120, window=50, size=25.0, beside=True),  # logits of up to 80, and beyond
    Case(length=1, window=500, earlier=77, heads=6, head_dim=19, value_dim=35, size=2.0, masked=True, beside=True),
]


def make(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value and, if there is one, logit and value of the key beside, in float64; the mask."""
    generator = torch.Generator().manual_seed(0)
    keys = case.length + case.earlier
    shapes = [(case.heads, case.length, case.head_dim), (case.key_heads, keys, case.head_dim)]
    shapes += [(case.key_heads, keys, case.value_dim)]
    shapes += [(case.heads, case.length), (case.heads, case.length, case.value_dim)] * case.beside
    tensors = [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[0] *= case.size
    if case.beside:
        tensors[3] = tensors[3] * case.size + 1.0
        tensors[3][:, :, 1::3] = float("-inf")
    if not case.masked:
        return tensors, None
    mask = torch.arange(keys) >= torch.tensor([0, min(5, keys - 1), keys])[:, None]
    mask[1, keys // 2 :: 3] = False
    return tensors, mask


def attend(case: Case, tensors: list[Tensor], mask: Tensor | None, backend: str = "native") -> Tensor:
    function = ops.sliding_window_attention_with_cache if case.earlier else ops.sliding_window_attention
    causal = {} if case.earlier else {"causal": case.causal}
    beside = ops.BesideKey(tensors[3], tensors[4]) if case.beside else None
    return function(
        *tensors[:3], window=case.window, key_mask=mask, beside=beside, scale=0.3, backend=backend, **causal
    )


def output_and_gradients(case: Case, tensors: list[Tensor], mask: Tensor | None, backend: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attend(case, leaves, mask, backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_agrees(case: Case) -> None:
    """Output and every gradient, in float32, with the reference in float64, where each of them is something."""
    tensors, mask = make(case)
    expected = output_and_gradients(case, tensors, mask, "reference")
    found = output_and_gradients(case, [x.float() for x in tensors], mask, "native")
    one_weight = case.window == 1 and not case.beside  # which is 1, whatever its score
    for name, one, other in zip(("output", "query", "key", "value", "logit", "beside"), found, expected, strict=False):
        assert other.abs().max() > 1e-3 or (one_weight and name in ("query", "key")), name
        error = relative_error(one, other) if other.any() else float(one.abs().max())
        assert error < 2e-6 * max(1.0, case.size), f"{name}: relative error {error}"


def assert_all_agree(cases: list[Case]) -> None:
    for case in cases:
        assert_agrees(case)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_agrees_with_the_reference(case, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_agrees(case)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_spans_gives_the_same_bits(causal, monkeypatch):
    case = Case(length=500, window=30, causal=causal, heads=2, key_heads=1, masked=True, beside=True)
    tensors, mask = make(case)
    found = []
    for spans in (1, 2, 5):
        monkeypatch.setattr(native, "_num_spans", lambda *_, spans=spans: spans)
        found.append(output_and_gradients(case, [x.float() for x in tensors], mask, "native"))
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


def test_few_heads_are_cut_into_a_span_for_each_thread(monkeypatch):
    monkeypatch.setattr(native, "num_workers", lambda device: 4)
    plan = native.Plan(31, 0, 1.0)
    assert [native._num_spans(heads, 1000, plan) for heads in (1, 2, 3, 4, 8)] == [4, 2, 4, 1, 1]
    assert native._num_spans(1, 100, plan) == 1  # a span would be short beside the window


def test_any_strides_give_the_same_bits():
    case = Case(masked=True, beside=True, heads=4)
    tensors, mask = make(case)
    tensors = [x.float() for x in tensors]
    turned = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in tensors]
    assert turned[0].stride(3) != 1
    expanded = torch.cat([mask, mask], 1)[:, : mask.shape[1]]
    assert not expanded.is_contiguous()
    found = output_and_gradients(case, turned, expanded, "native")
    expected = output_and_gradients(case, tensors, mask, "native")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("changed", [1, 33, 64, 99])
def test_later_tokens_change_nothing_before_them_however_large(changed):
    case = Case(beside=True)
    tensors, _ = make(case)
    tensors = [x.float() for x in tensors]
    before = attend(case, tensors, None)[:, :, :changed]
    for x, factor in zip(tensors, (-3.0, 1e20, -3.0, -3.0, -3.0), strict=True):
        x[:, :, changed:] *= factor
    after = attend(case, tensors, None)
    assert torch.equal(after[:, :, :changed], before)
    assert not torch.equal(
        after[:, :, changed:], attend(case, make(case)[0], None, "reference")[:, :, changed:].float()
    )


def test_what_stands_at_masked_tokens_is_not_read():
    case = Case(masked=True, heads=4)
    tensors, mask = make(case)
    tensors = [x.float() for x in tensors]
    spoiled = [x.clone() for x in tensors]
    for x in spoiled[1:]:
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    found, expected = (output_and_gradients(case, x, mask, "native") for x in (spoiled, tensors))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("place", [2, 39])
def test_one_query_reads_nothing_at_a_masked_token_and_hides_no_nan(place):
    query, key, value = torch.randn(3, 1, 2, 40, 20, generator=torch.Generator().manual_seed(0)).unbind()
    mask = torch.ones(1, 40, dtype=torch.bool)
    options = {"window": 37, "backend": "native"}
    seen = ops.sliding_window_attention_with_cache(query[:, :, -1:], key, value, **options)
    value[0, 0, place], key[0, 1, place] = torch.nan, torch.nan
    spoiled = ops.sliding_window_attention_with_cache(query[:, :, -1:], key, value, **options)
    assert spoiled.isnan().all() if place == 39 else torch.equal(spoiled, seen)
    mask[0, place] = False
    hidden = ops.sliding_window_attention_with_cache(query[:, :, -1:], key, value, key_mask=mask, **options)
    key[0, :, place] = value[0, :, place] = 0.0
    expected = ops.sliding_window_attention_with_cache(query[:, :, -1:], key, value, key_mask=mask, **options)
    assert hidden.isfinite().all()
    assert torch.equal(hidden, expected)


def test_a_query_without_a_key_gets_zeros_and_a_gradient_of_zeros():
    case = Case(masked=True, beside=True)
    tensors, mask = make(case)
    output, of_query, *_ = output_and_gradients(case, [x.float() for x in tensors], mask, "native")
    assert output[1, :, 1].eq(0).all()  # before its row's first token, and its key beside is none
    assert of_query[1, :, :5].eq(0).all()
    torch.testing.assert_close(output[2, :, 0].double(), tensors[4][2, :, 0], rtol=1e-6, atol=0)  # the only key it has


@pytest.mark.parametrize(
    "case", [Case(length=40, masked=True, beside=True, heads=4), Case(length=9, earlier=30)], ids=str
)
def test_it_is_an_operator(case):
    tensors, mask = make(case)
    tensors = [x.float() for x in tensors]
    arguments = [*tensors[:3], mask, *(tensors[3:] or (None, None)), 19, 0, 0.3, 0, "native"]
    differentiable = [x if x is None or not x.is_floating_point() else x.requires_grad_() for x in arguments[:6]]
    torch.library.opcheck(torch.ops.polysketch.window_attention.default, (*differentiable, *arguments[6:]))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    outputs = torch.ops.polysketch.window_attention(*plain)
    backward = torch.ops.polysketch.window_attention_backward.default
    torch.library.opcheck(backward, (torch.randn_like(outputs[0]), list(outputs), *plain))


@pytest.mark.parametrize("case", [Case(), Case(causal=False), Case(earlier=9), Case(window=300)], ids=str)
def test_operations_are_counted_for_the_keys_that_are_seen(case):
    tensors, _ = make(case)
    position = torch.arange(case.length + case.earlier)
    age = position[case.earlier :, None] - position
    seen = int(((age < case.window) & (age > -case.window * (not case.causal) - case.causal)).sum())
    with FlopCounterMode(display=False) as counter:
        attend(case, [x.float() for x in tensors], None)
    assert counter.get_total_flops() == 2 * 3 * case.heads * seen * (case.head_dim + case.value_dim)


def test_decoding_one_token_at_a_time_gives_the_rows_of_the_whole():
    case = Case(length=60, masked=True, beside=True, heads=4)
    tensors, mask = make(case)
    tensors = [x.float() for x in tensors]
    whole = attend(case, tensors, mask)
    with torch.no_grad():
        for last in (1, 5, 20, 59, 60):
            first = max(0, last - case.window)
            query, logit, other = (tensors[i][:, :, last - 1 : last] for i in (0, 3, 4))
            key, value = (tensors[i][:, :, first:last] for i in (1, 2))
            options = {"window": case.window, "scale": 0.3, "key_mask": mask[:, first:last], "backend": "native"}
            beside = ops.BesideKey(logit, other)
            found = ops.sliding_window_attention_with_cache(query, key, value, **options, beside=beside)
            torch.testing.assert_close(found[:, :, 0], whole[:, :, last - 1])


FORWARD, ONE, BACKWARD = (f"window_attention{name}.cpp" for name in ("", "_one", "_backward"))
HEADER, GRADIENTS = "seen_pairs.h", "pairs_backward.h"
SOFTMAX = "running_softmax.h"
MUTANTS = {
    "one token too many": (
        HEADER,
        "(ages <= static_cast<int32_t>(behind))",
        "(ages <= static_cast<int32_t>(behind) + 1)",
    ),
    "no causal mask": (HEADER, "(ages >= static_cast<int32_t>(-ahead))", "(ages >= static_cast<int32_t>(-ahead) - 1)"),
    "the first half of a block misses keys": (HEADER, "position + call.ahead + kHalf", "position + call.ahead"),
    "the second half of a block misses keys": (
        HEADER,
        "position - call.behind + kHalf",
        "position - call.behind + kQueries",
    ),
    "the mask is forgotten": (HEADER, "if (!span.is_real(key + j)) {", "if (false) {"),
    "keys are not moved": (HEADER, "(last_ - range.first) * row * sizeof", "0 * sizeof"),
    "earlier blocks keep their scale": (SOFTMAX, "store(factor_ + v, factor);", "store(factor_ + v, splat(1.0f));"),
    "the mass keeps its scale": (SOFTMAX, "load(mass + v) * factor + sum", "load(mass + v) + sum"),
    "the key beside has no mass": (FORWARD, "softmax_.resume(t, logit, 1.0f,", "softmax_.resume(t, logit, 0.0f,"),
    "the key beside has no value": (SOFTMAX, "mean[i] * from_mass", "0.0f * from_mass"),
    "one query sees all keys": (ONE, "std::max<int64_t>(call.keys - 1 - call.behind, 0)", "0"),
    "one query forgets the mask": (ONE, "          span_.is_real(key) ? dot", "          true ? dot"),
    "one query forgets its scale": (ONE, "query[i] * call.scale", "query[i]"),
    "one query has no mass of the key beside": (ONE, "weigh(peak) + beside_", "weigh(peak)"),
    "one query has no value of the key beside": (ONE, "if (is_beside) add_scaled", "if (false) add_scaled"),
    "one query counts what is behind the last key": (
        ONE,
        "padded(seen_.count()), kHidden);",
        "padded(seen_.count()), 0.0f);",
    ),
    "the mean is not taken away": (SOFTMAX, "(load(changes + i) - average)", "load(changes + i)"),
    "no scale in the gradient of queries": (GRADIENTS, "*= of_query_[t];", "*= 1.0f;"),
    "no scale in the gradient of keys": (
        BACKWARD,
        "std::fill(of_query, of_query + kQueries, call_.scale)",
        "std::fill(of_query, of_query + kQueries, 1.0f)",
    ),
    "sums of keys begin where others ended": (HEADER, "{ zero(sums, row); }", "{}"),
    "queries of the next span are forgotten": (
        GRADIENTS,
        "if (!own && !owned.count()) continue;",
        "if (!own) continue;",
    ),
    "the key beside has no mean": (BACKWARD, "call_.value_width) - mean_[t])", "call_.value_width))"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_num_spans", lambda *_: 2)
    file, old, new = MUTANTS[name]
    cases = [case for case in CASES if (case.length == 1 if file == ONE else case.length > 90)]
    assert_all_agree(cases)
    source = tmp_path / "source"
    source.mkdir()
    for path in (
        *SOURCE.glob("*.h"),
        SOURCE / FORWARD,
        SOURCE / ONE,
        SOURCE / BACKWARD,
    ):  # the other programs take longer to compile
        shutil.copy(path, source)
    text = (source / file).read_text()
    assert text.count(old) == 1
    (source / file).write_text(text.replace(old, new))
    broken = ctypes.CDLL(str(build.compiled(source, tmp_path)))
    monkeypatch.setattr(native, "library", lambda: broken)
    with pytest.raises(AssertionError, match="relative error"):
        assert_all_agree(cases)


def test_the_case_of_large_logits_has_logits_of_eighty():
    case = next(case for case in CASES if case.size > 1)
    (query, key, *_), _ = make(case)
    assert (query @ key.mT * 0.3).abs().max() > 80
    assert replace(case, size=1.0) != case


@pytest.mark.parametrize("where", ["query", "key", "logit"])
def test_what_is_no_number_stays_none_where_it_is_seen_and_nowhere_else(where: str):
    query, key = torch.randn(2, 1, 1, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    value, logit = torch.randn(1, 1, 40, 8), torch.zeros(1, 1, 40)
    {"query": query, "key": key, "logit": logit}[where][0, 0, 11] = float("nan")
    beside = ops.BesideKey(logit, torch.ones_like(value))
    options = {"window": 3, "causal": True, "beside": beside}
    found, expected = (
        ops.sliding_window_attention(query, key, value, backend=backend, **options)
        for backend in ("native", "reference")
    )
    assert expected[0, 0, 11].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_key_beside_on_another_device_is_refused():
    x = torch.randn(1, 1, 6, 4)
    beside = ops.BesideKey(torch.zeros(1, 1, 6, device="meta"), torch.ones(1, 1, 6, 4, device="meta"))
    with pytest.raises(ValueError, match="must be on one device"):
        ops.sliding_window_attention(x, x, x, window=3, causal=True, beside=beside)
