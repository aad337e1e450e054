"""Without gradients a long sequence is computed span by span: the same numbers, in memory that does not grow."""

import pytest
import torch

from attention.covering import pairs_always
from polysketch import attention
from polysketch.attention import in_spans

LENGTH, HEADS, KV_HEADS, WIDTH = 75, 4, 2, 16
MECHANISMS = ["performer", "polarity", "focused", "based", "hedgehog", "llops", "linear"]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(in_spans, "_NUMBERS", 0)
    monkeypatch.setattr(in_spans, "_FEWEST_FEATURES", 0)
    monkeypatch.setattr(in_spans, "_FEWEST_TOKENS", 8)


@pytest.fixture
def spans(monkeypatch):
    """The spans that were asked for."""
    seen, attended = [], in_spans.attended

    def counted(mechanism, query, key, value, span, **given):
        seen.append(span)
        return attended(mechanism, query, key, value, span, **given)

    monkeypatch.setattr(in_spans, "attended", counted)
    return seen


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    query = torch.randn(3, HEADS, LENGTH, WIDTH, dtype=dtype)
    key, value = (torch.randn(3, KV_HEADS, LENGTH, WIDTH, dtype=dtype) for _ in range(2))
    return query, key, value


def masks():
    left, right, holes = (torch.ones(3, LENGTH, dtype=torch.bool) for _ in range(3))
    left[0, :30] = left[1, :3] = False  # a row begins inside the fourth span
    right[0, 40:] = right[1, 8:] = False  # whole spans of nothing
    holes[0, 5:29] = holes[2, ::3] = False
    return {"none": None, "left": left, "right": right, "holes": holes}


def build(name, dtype=torch.float32, **options):
    torch.manual_seed(1)
    return attention.build(name, num_heads=HEADS, head_dim=WIDTH, num_kv_heads=KV_HEADS, **options).to(dtype)


@pytest.mark.parametrize(
    ("name", "mask", "dtype"),
    pairs_always({"name": tuple(MECHANISMS), "mask": tuple(masks()), "dtype": (torch.float32, torch.float64)}),
)
def test_spans_give_what_the_whole_gives(name, mask, dtype, spans):
    mechanism, key_mask = build(name, dtype), masks()[mask]
    query, key, value = inputs(dtype)
    if key_mask is not None:  # what is masked must not count
        key, value = (x.masked_fill(~key_mask[:, None, :, None], float("nan")) for x in (key, value))
    whole = mechanism(query.requires_grad_(), key, value, key_mask=key_mask).detach()
    assert spans == []
    with torch.no_grad():
        found = mechanism(query, key, value, key_mask=key_mask)
    assert spans == [8]
    real = torch.ones(3, LENGTH, dtype=torch.bool) if key_mask is None else key_mask
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for row in range(3):
        expected = whole[row, :, real[row]]
        assert (found[row, :, real[row]] - expected).norm() <= tolerance * expected.norm()


def test_a_gate_reads_its_own_span(spans):
    mechanism = build("polarity", output_gate=True, hidden_size=24)
    query, key, value = inputs()
    hidden = torch.randn(3, LENGTH, 24)
    whole = mechanism(query, key, value, hidden=hidden).detach()
    with torch.no_grad():
        found = mechanism(query, key, value, hidden=hidden)
    assert spans == [8]
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)


def test_values_of_another_width(spans):
    mechanism = build("performer")
    query, key, _ = inputs()
    value = torch.randn(3, KV_HEADS, LENGTH, 5)
    whole = mechanism(query.requires_grad_(), key, value).detach()
    with torch.no_grad():
        torch.testing.assert_close(mechanism(query, key, value), whole, rtol=1e-4, atol=1e-6)
    assert spans == [8]


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("performer", {"causal": False}, {}),
        ("performer", {"block_size": 16}, {}),
        ("performer", {}, {"local_chunk": 16}),
        ("polysketch-paper", {}, {}),
        ("symmetric-power", {}, {}),
    ],
)
def test_the_whole_is_computed_at_once_where_spans_would_not_pay(name, given, changes, spans):
    with torch.no_grad():
        build(name, **changes)(*inputs(), **given)
    assert spans == []


def test_transforms_take_the_whole(spans):
    mechanism = build("linear")
    query, key, value = inputs()
    with torch.no_grad():
        expected = mechanism(query, key, value)
        assert spans == [8]
        mapped = torch.vmap(mechanism)(query[:, None], key[:, None], value[:, None])[:, 0]
    assert spans == [8]
    torch.testing.assert_close(mapped, expected, rtol=1e-4, atol=1e-6)


def test_spans_of_half_precision_are_rounded_once(spans):
    mechanism = build("linear").bfloat16()
    query, key, value = (x.bfloat16() for x in inputs())
    whole = mechanism(query.requires_grad_(), key, value).detach()
    with torch.no_grad():
        found = mechanism(query, key, value)
    assert spans == [8]
    torch.testing.assert_close(found, whole, rtol=2**-7, atol=2**-12)  # a unit of rounding


def test_few_features_are_computed_at_once(spans, monkeypatch):
    monkeypatch.setattr(in_spans, "_FEWEST_FEATURES", 3 * (HEADS + KV_HEADS) * WIDTH * LENGTH + 1)
    with torch.no_grad():
        build("linear")(*inputs())
    assert spans == []


def test_memory_holds_the_features_of_a_span_and_not_of_all(monkeypatch):
    """The largest tensor that the feature map makes."""
    mechanism = build("performer", num_features=64)
    sizes, map_both = [], type(mechanism.feature_map).map_both

    def measured(self, query, key):
        found = map_both(self, query, key)
        sizes.append(max(x.numel() for x in found))
        return found

    monkeypatch.setattr(type(mechanism.feature_map), "map_both", measured)
    with torch.no_grad():
        mechanism(*inputs())
    assert max(sizes) == 3 * HEADS * 8 * 64
    assert len(sizes) == -(-LENGTH // 8)
