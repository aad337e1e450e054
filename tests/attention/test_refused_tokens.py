"""One rule for mechanisms: tokens that do not belong together are refused, and the state is as it was."""

import pytest
import torch

from polysketch.attention import MECHANISMS, Mechanism, build

HEADS, HEAD_DIM, WIDTH, ROWS = 2, 8, 16, 2
CAUSAL = sorted(name for name, kind in MECHANISMS.items() if kind.is_causal)
WRONG = {
    "value of one row": (ValueError, 0, 0, lambda value: value[:1]),
    "value of a longer text": (ValueError, 0, 0, lambda value: torch.cat([value, value], 2)),
    "fewer queries": (ValueError, -1, 0, None),
    "more queries": (ValueError, 2, 0, None),
    "fewer rows of queries": (ValueError, 0, -1, None),
    "whole numbers as values": (TypeError, 0, 0, lambda value: value.long()),
}


def mechanism(name: str) -> Mechanism:
    torch.manual_seed(0)
    return build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=1)


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randn(ROWS, heads, count, HEAD_DIM) for heads in (HEADS, 1, 1)]


def extended(layer: Mechanism, new: list[torch.Tensor], state) -> torch.Tensor:
    hidden = torch.ones(ROWS, new[1].shape[2], WIDTH)
    return layer.extend(*new, state, hidden=hidden)[0]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", CAUSAL)
def test_refused_tokens_leave_a_state_as_it_is(name, wrong, count):
    layer = mechanism(name)
    state = layer.init_state(ROWS, "cpu", torch.float32)
    extended(layer, tokens(9), state)
    untouched = state.clone()
    error, queries, rows, change = WRONG[wrong]
    query, key, value = tokens(count)
    if queries or rows:
        query = torch.randn(ROWS + rows, HEADS, count + queries, HEAD_DIM)
        if not count + queries:
            pytest.skip("no queries are no tokens, and take nothing")
    with pytest.raises(error, match=r"got|expected"):
        extended(layer, [query, key, value if change is None else change(value)], state)
    new = tokens(3)
    assert torch.equal(extended(layer, new, state), extended(layer, new, untouched))


@pytest.mark.parametrize("name", CAUSAL)
def test_whole_numbers_are_no_values(name):
    query, key, value = tokens(5)
    with pytest.raises(TypeError, match="floating point"):
        mechanism(name)(query, key, value.long(), causal=True, hidden=torch.ones(ROWS, 5, WIDTH))


def test_heavy_decodes_no_rows():
    layer = mechanism("polysketch-heavy")
    state = layer.init_state(0)
    output, _ = layer.extend(*(x[:0] for x in tokens(5)), state)
    assert output.shape == (0, HEADS, 5, HEAD_DIM)


@pytest.mark.parametrize("name", ["polysketch", "polysketch-window"])
def test_queries_as_many_as_keys_are_asked_for_by_their_own_names(name):
    query, key, value = tokens(9)
    with pytest.raises(ValueError, match="9 queries and 5 keys"):
        mechanism(name)(query, key[:, :, :5], value[:, :, :5], causal=True, hidden=torch.ones(ROWS, 9, WIDTH))


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_span_has_as_many_queries_as_keys(name, count):
    layer = mechanism(name)
    try:
        state = layer.init_span(ROWS)
    except NotImplementedError:
        pytest.skip("it has no spans")
    query, key, value = torch.randn(ROWS, HEADS, count, HEAD_DIM), *tokens(9)[1:]
    with pytest.raises(ValueError, match=f"{count}"):
        layer.forward_span(query, key, value, state, hidden=torch.ones(ROWS, 9, WIDTH))
