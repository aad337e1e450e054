"""One token of every row by the programs of the delta rule and of the window: as the definition, and where rows lie."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.ops.delta import self_check as delta_check
from polysketch.ops.delta.triton.decoding import extend_one_, why_not_extend
from polysketch.ops.delta.types import Inputs as DeltaInputs
from polysketch.ops.triton import availability, forced, self_check
from polysketch.ops.window import reference
from polysketch.ops.window import self_check as window_check
from polysketch.ops.window.triton import attend_one
from polysketch.ops.window.types import Inputs, Plan

# More than one block of everything.
SMALL = {
    "delta_extend": {"ROWS": 16, "COLUMNS": 16, "num_warps": 4, "num_stages": 1},
    "window_one": {"TOKENS": 16, "num_warps": 4, "num_stages": 1},
}
ROWS, POOL = [3, 1], 5


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    with forced(**SMALL):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize(("factors", "heads"), [(2, 2), (2, 4), (1, 2)])
def test_the_delta_rule_writes_as_plain_pytorch_does(factors, heads, rows):
    torch.manual_seed(0)
    sizes = (2 if rows is None else POOL, 2, 10, 18)
    pool = ops.LinearAttentionState.init(*sizes, factors=factors, dtype=torch.float64)
    pool.sums.normal_()
    alone = pool.clone() if rows is None else pool.reorder(torch.tensor(rows))
    pool = in_pages(replace(pool, sums=pool.sums.float(), normalizer=pool.normalizer.float()))
    before = pool.sums.clone()
    state = pool if rows is None else ops.StateRows(pool, torch.tensor(rows), torch.zeros(2, dtype=torch.int64))
    for token in range(1, 4):
        given = token_of(heads)
        expected = ops.delta_attention_extend_(*given, alone, factors=factors)
        query, *others = (x.float() for x in given)
        found = extend_one_(query, DeltaInputs(*others), state, factors)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        assert state.position.tolist() == [token, token]
    own = pool.sums if rows is None else pool.sums[rows]
    torch.testing.assert_close(own.double(), alone.sums, rtol=1e-5, atol=1e-5)
    ones = pool.normalizer if rows is None else pool.normalizer[rows]
    torch.testing.assert_close(ones.double(), alone.normalizer, rtol=1e-5, atol=1e-5)
    if rows is not None:
        assert torch.equal(pool.sums[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("factors", [1, 2])
def test_the_delta_rule_reads_sums_in_half_precision_and_rounds_them_once(factors):
    torch.manual_seed(0)
    state = ops.LinearAttentionState.init(2, 2, 10, 18, factors=factors)
    state.sums.normal_()
    state = state.with_sums_in(torch.float16)
    for _ in range(2):
        given = token_of(4)
        wide = state.with_sums_in(torch.float64)
        wide = replace(wide, normalizer=wide.normalizer.double(), position=wide.position.clone())
        expected = ops.delta_attention_extend_(*given, wide, factors=factors)
        query, *others = (x.float() for x in given)
        found = extend_one_(query, DeltaInputs(*others), state, factors)
        # The first query of a key head is answered before sums are rounded, further ones after it.
        torch.testing.assert_close(found[:, ::2].double(), expected[:, ::2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2**-8)
        torch.testing.assert_close(state.sums, wide.sums.half(), rtol=2**-10, atol=0)


def token_of(heads: int) -> list[Tensor]:
    """Query, key, value, strength."""
    query, key = (F.normalize(torch.randn(2, count, 1, 10).double(), dim=-1) for count in (heads, 2))
    return [query, key, torch.randn(2, 2, 1, 18).double(), torch.rand(2, 2, 1).double()]


def in_pages(state: ops.LinearAttentionState) -> ops.LinearAttentionState:
    """Sums and normalizers with something between two rows."""
    batch, sums, ones = state.batch_size, state.sums[0].numel(), state.normalizer[0].numel()
    pages = torch.full((batch, sums + ones + 3), float("nan"))
    views = pages[:, :sums].unflatten(1, state.sums.shape[1:]), pages[:, sums : sums + ones]
    views[0].copy_(state.sums)
    views[1].copy_(state.normalizer.flatten(1))
    return replace(state, sums=views[0], normalizer=views[1].unflatten(1, state.normalizer.shape[1:]))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_one_query_looks_into_rows_of_a_cache(dtype, tolerance, masked, beside):
    torch.manual_seed(0)
    cache = torch.randn(POOL, 2, 40, 50).to(dtype)
    query, key, value = torch.randn(2, 4, 1, 20).to(dtype), cache[..., :20], cache[..., 23:41]
    mask = torch.rand(POOL, 50)[:, 3:43] > 0.3 if masked else None
    more = (torch.randn(2, 4, 1).to(dtype), torch.randn(2, 4, 1, 18).to(dtype)) if beside else ()
    inputs, plan, rows = Inputs(query, key, value, mask, *more), Plan(34, 0, 0.3), torch.tensor(ROWS)
    found = attend_one(inputs, plan, rows)
    exact = Inputs(*(x if x is None or x.dtype == torch.bool else x.double() for x in inputs)).taken(rows)
    torch.testing.assert_close(found.double(), reference.attend(exact, plan), rtol=tolerance, atol=tolerance)


def test_nothing_seen_is_zeros_and_nothing_beside_has_no_weight():
    cache = torch.full((POOL, 1, 20, 16), float("nan"))
    mask, rows = torch.zeros(POOL, 20, dtype=torch.bool), torch.tensor(ROWS)
    nothing = torch.full((2, 1, 1), -math.inf), torch.full((2, 1, 1, 16), float("nan"))
    for more in ((), nothing):
        inputs = Inputs(torch.randn(2, 1, 1, 16), cache, cache, mask, *more)
        assert torch.equal(attend_one(inputs, Plan(19, 0, 1.0), rows), torch.zeros(2, 1, 1, 16))
    beside = Inputs(torch.randn(2, 1, 1, 16), cache, cache, mask, torch.zeros(2, 1, 1), torch.ones(2, 1, 1, 16))
    assert torch.equal(attend_one(beside, Plan(19, 0, 1.0), rows), torch.ones(2, 1, 1, 16))


def test_auto_takes_both_programs_once_they_agree(tmp_path, monkeypatch):
    """As on a device: what is served goes by number, and copies nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_answers", {})
    availability.AUTO_DEVICES.add("cpu")
    try:
        monkeypatch.setattr(ops.StateRows, "gathered", lambda self: pytest.fail("sums were copied"))
        monkeypatch.setattr("polysketch.ops.window.native.forward", lambda *_: pytest.fail("not Triton's"))
        pool = ops.LinearAttentionState.init(POOL, 2, 10, 18, factors=2)
        state = ops.StateRows(pool, torch.tensor(ROWS), torch.zeros(2, dtype=torch.int64))
        ops.delta_attention_extend_(*(x.float() for x in token_of(2)), state, factors=2)
        assert pool.sums[ROWS].abs().sum() > 0
        query, cache = torch.randn(2, 2, 1, 8).half(), torch.randn(POOL, 2, 9, 8).half()
        assert window_check.program_agrees(Inputs(query, cache, cache))
        monkeypatch.setattr(Inputs, "taken", lambda self, rows: pytest.fail("a window was copied"))
        found = ops.sliding_window_attention_with_cache(query, cache, cache, window=9, key_rows=torch.tensor(ROWS))
        expected = ops.sliding_window_attention_with_cache(query, cache[ROWS], cache[ROWS], window=9)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    finally:
        availability.AUTO_DEVICES.discard("cpu")


@pytest.mark.parametrize(("check", "half"), [("delta", None), ("delta", torch.float16), ("window", None)])
def test_a_wrong_program_is_not_taken(check, half, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_answers", {})
    module = delta_check if check == "delta" else window_check
    name = "extend_one_" if check == "delta" else "attend_one"
    right = getattr(module, name)
    by = 1.1 if half is None else 1.5  # than what sums in half precision may be off
    wrong = [1.0]
    monkeypatch.setattr(module, name, lambda *arguments: right(*arguments) * wrong[0])
    query, *others = (x.float() for x in token_of(2))
    cache = torch.randn(POOL, 2, 9, 8)
    pool = ops.LinearAttentionState.init(POOL, 2, 10, 18, factors=2, sums_dtype=half)
    rows = ops.StateRows(pool, torch.tensor(ROWS), torch.zeros(2, dtype=torch.int64))
    ask = {
        "delta": lambda: delta_check.steps_agree(query, DeltaInputs(*others), 2, rows),
        "window": lambda: window_check.program_agrees(Inputs(torch.randn(2, 2, 1, 8), cache, cache)),
    }[check]
    assert ask()
    wrong[0] = by
    monkeypatch.setattr(self_check, "_answers", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.warns(UserWarning, match="disagree"):
        assert not ask()


def test_states_that_the_program_cannot_take_are_named():
    state = ops.LinearAttentionState.init(1, 2, 10, 18, factors=2)
    assert why_not_extend(torch.zeros(1), state) is None
    state.sums = state.sums.mT.contiguous().mT
    assert "in one piece" in (why_not_extend(torch.zeros(1), state) or "")
    assert "in float32 and half" in (why_not_extend(torch.zeros(1), replace(state, sums=state.sums.double())) or "")
