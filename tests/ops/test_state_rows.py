"""Rows of a state that many share move on where they lie, and as states of their own would."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.covering import pairs_always
from ops.linear_cases import Case, arguments, empty_state, make, relative_error
from polysketch import ops
from polysketch.ops.linear import native

ROWS, POOL = [4, 1, 2], 6
CASES = {
    "power 2 in chunks": Case(length=9, batch=3, local_chunk=4, decays=True),
    "power 1": Case(length=5, batch=3, power=1, local_chunk=0, normalize=False),
    "products": Case(length=5, batch=3, power=1, factors=2, local_chunk=0, decays=True),
}


def in_pages(state: ops.LinearAttentionState) -> ops.LinearAttentionState:
    """The same numbers, each row of all tensors side by side, as a server keeps them."""
    tensors = {name: x for name, x in state.tensors().items() if name != "position"}
    size = sum(x[0].numel() for x in tensors.values())
    pages, start, moved = torch.full((POOL, size + 3), float("nan"), dtype=state.sums.dtype), 0, {}
    for name, x in tensors.items():
        view = pages[:, start : start + x[0].numel()].unflatten(1, x.shape[1:])
        view.copy_(x)
        start, moved[name] = start + x[0].numel(), view
    return replace(state, **moved)


def pool_of(case: Case) -> ops.LinearAttentionState:
    """Rows that stand at unlike positions."""
    state = empty_state(replace(case, batch=POOL))
    for position in range(7):
        first = make(replace(case, batch=POOL, seed=position + 5), 1)
        first.key_mask = torch.arange(POOL)[:, None] <= position
        options = arguments(case, first)
        ops.linear_attention_extend_(first.query, first.key, first.value, state, **options)
    return state


@pytest.mark.parametrize(
    ("dtype", "tolerance", "name", "tokens"),
    [
        pytest.param(*each.values[0], *each.values[1:], marks=each.marks)
        for each in pairs_always(
            {"kind": ((torch.float32, 1e-5), (torch.float64, 1e-12)), "name": tuple(CASES), "tokens": (1, 3, 6)}
        )
    ],
)
def test_rows_of_a_pool_are_as_states_of_their_own(name, dtype, tolerance, tokens):
    case = replace(CASES[name], dtype=dtype)
    pool, wide = in_pages(pool_of(case)), pool_of(replace(case, dtype=torch.float64))
    before = {key: x.clone() for key, x in pool.tensors().items()}
    rows = torch.tensor(ROWS)
    some, alone = ops.StateRows(pool, rows, pool.position[rows]), wide.reorder(rows)
    tensors = make(replace(case, length=12))
    for start in range(0, 12, tokens):
        one = tensors.span(start, start + tokens)
        found = ops.linear_attention_extend_(one.query, one.key, one.value, some, **arguments(case, one))
        one = one.map(lambda x: x.double())
        expected = ops.linear_attention_extend_(one.query, one.key, one.value, alone, **arguments(case, one))
        assert relative_error(found.output, expected.output) < tolerance
        assert some.position.tolist() == alone.position.tolist()
    for key, x in pool.tensors().items():
        if key == "position":
            continue
        assert x.numel() == 0 or relative_error(x[rows], getattr(alone, key)) < tolerance, key
        others = [row for row in range(POOL) if row not in ROWS]
        assert torch.equal(x[others], before[key][others]), key


def test_a_step_copies_no_state(monkeypatch):
    case = replace(CASES["power 2 in chunks"], dtype=torch.float32)
    if not native.can_extend(make(case, 1).query, pool_of(case)):
        pytest.skip("needs a compiler")
    monkeypatch.setattr(ops.StateRows, "gathered", lambda self: pytest.fail("a copy"))
    pool, one = in_pages(pool_of(case)), make(case, 1)
    some = ops.StateRows(pool, torch.tensor(ROWS), pool.position[ROWS])
    ops.linear_attention_extend_(one.query, one.key, one.value, some, **arguments(case, one))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_delta_rule_writes_into_rows_of_a_pool(dtype, tolerance, tokens):
    torch.manual_seed(0)
    rows, pool = torch.tensor(ROWS), ops.LinearAttentionState.init(POOL, 2, 8, 5, factors=2, dtype=torch.float64)
    pool.sums.normal_()
    alone = pool.reorder(rows)
    narrow = {name: x.to(dtype) for name, x in pool.tensors().items() if name != "position"}
    pool = in_pages(replace(pool, **narrow))
    before, some = pool.sums.clone(), ops.StateRows(pool, rows, torch.zeros(3, dtype=torch.int64))
    for _ in range(4):
        query, key = (F.normalize(torch.randn(3, heads, tokens, 8).double(), dim=-1) for heads in (4, 2))
        given: list[Tensor] = [query, key, torch.randn(3, 2, tokens, 5).double(), torch.rand(3, 2, tokens).double()]
        expected = ops.delta_attention_extend_(*given, alone, factors=2)
        found = ops.delta_attention_extend_(*(x.to(dtype) for x in given), some, factors=2)
        assert relative_error(found, expected) < tolerance
    assert relative_error(pool.sums[rows], alone.sums) < tolerance
    assert torch.equal(pool.sums[[0, 3, 5]], before[[0, 3, 5]])


@pytest.mark.parametrize("backend", ["reference", "blockwise", "native"])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_window_looks_into_rows_of_a_cache(backend, queries):
    torch.manual_seed(0)
    query, pool = torch.randn(3, 4, queries, 8), torch.randn(POOL, 2, 7, 20)
    key, value, mask = pool[..., :8], pool[..., 9:14], torch.rand(POOL, 9)[:, 1:8] > 0.3
    beside = ops.BesideKey(torch.randn(3, 4, queries), torch.randn(3, 4, queries, 5))
    rows, options = torch.tensor(ROWS), {"window": 5, "beside": beside, "backend": backend}
    found = ops.sliding_window_attention_with_cache(query, key, value, key_mask=mask, key_rows=rows, **options)
    own = (query, key[rows], value[rows])
    expected = ops.sliding_window_attention_with_cache(*own, key_mask=mask[rows], **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "what"),
    [([0, 6, 1], "from 0 to 5"), ([0, -1, 1], "from 0 to 5"), ([0, 2], "3 rows"), ([[0], [1], [2]], "3 rows")],
)
def test_rows_that_a_pool_does_not_have_are_refused(rows, what):
    with pytest.raises(ValueError, match=what):
        ops.StateRows(pool_of(CASES["power 1"]), torch.tensor(rows), torch.zeros(3, dtype=torch.int64))
    tensors = torch.randn(3, 2, 1, 4), torch.randn(POOL, 2, 7, 4), torch.randn(POOL, 2, 7, 4)
    with pytest.raises(ValueError, match=what):
        ops.sliding_window_attention_with_cache(*tensors, window=3, key_rows=torch.tensor(rows))


def test_a_row_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="every row once"):
        ops.StateRows(pool_of(CASES["power 1"]), torch.tensor([1, 4, 1]), torch.zeros(3, dtype=torch.int64))
