"""One rule for mechanisms: tokens that do not belong together are refused, and the state is as it was."""

import pytest
import torch

from polysketch.attention import MECHANISMS, Mechanism, build, option_names

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
    with pytest.raises(error, match=r"got|expected"):
        extended(layer, [query, key, value if change is None else change(value)], state)
    new = tokens(3)
    assert torch.equal(extended(layer, new, state), extended(layer, new, untouched))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_values_of_a_wider_dtype_are_taken_whole_or_not_at_all(name, started, count):
    layer = mechanism(name)
    state = layer.init_state(ROWS)
    if started:
        extended(layer, tokens(9), state)
    untouched = state.clone()
    query, key, value = tokens(count)
    try:
        extended(layer, [query, key, value.double()], state)
    except (TypeError, ValueError):
        new = tokens(3)
        assert torch.equal(extended(layer, new, state), extended(layer, new, untouched))
    else:
        assert state.position.tolist() == (untouched.position + count).tolist()


GATED = {
    "polysketch": {},
    "polysketch-window": {},
    "polysketch-paper": {"decay_gate": True},
    "polarity": {"output_gate": True},
}


def test_these_are_the_mechanisms_that_may_read_the_layers_input():
    assert sorted(GATED) == sorted(name for name in MECHANISMS if "hidden_size" in option_names(name))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", GATED)
def test_the_layers_input_is_of_the_same_tokens(name, count):
    """What would broadcast, too: one row for all, one token for all."""
    torch.manual_seed(0)
    options = GATED[name] | {"hidden_size": WIDTH}
    layer = build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=1, **options)
    assert layer.reads_hidden
    new = tokens(count)
    for shape in ((1, count, WIDTH), (ROWS, count + 1, WIDTH), (ROWS, 1, WIDTH), (count, WIDTH)):
        if shape == (ROWS, count, WIDTH):
            continue
        hidden = torch.ones(shape)
        with pytest.raises(ValueError, match=r"hidden must be \(batch, length, width\)"):
            layer(*new, causal=layer.is_causal, hidden=hidden)
        if layer.is_causal:
            state = layer.init_state(ROWS)
            with pytest.raises(ValueError, match="hidden must be"):
                layer.extend(*new, state, hidden=hidden)
            assert not state.position.any()
            with pytest.raises(ValueError, match="hidden must be"):
                layer.forward_span(*new, layer.init_span(ROWS), hidden=hidden)


OTHER_SIZES = {
    "local": [{"local_chunk": 4}, {"local_chunk": 8}],
    "sliding-window": [{"window": 4}, {"window": 8}],
    "polysketch-heavy": [{"heavy_size": 4}, {"heavy_size": 8}],
    "polysketch": [{"window": 4}, {"window": 8}],
    "softmax": [{}, {"num_kv_heads": 2}],
    "polynomial": [{}, {"num_kv_heads": 2}],
    "sliding-window of more heads": [{}, {"num_kv_heads": 2}],
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", OTHER_SIZES)
def test_a_state_of_a_mechanism_of_other_sizes_is_refused(name, count):
    own, other = (
        build(name.split(" ")[0], **{"num_heads": HEADS, "head_dim": HEAD_DIM, "num_kv_heads": 1} | options)
        for options in OTHER_SIZES[name]
    )
    state = own.init_state(ROWS)
    extended(own, tokens(9), state)
    untouched = state.clone()
    new = [torch.randn(ROWS, heads, count, HEAD_DIM) for heads in (HEADS, other.num_kv_heads, other.num_kv_heads)]
    with pytest.raises(ValueError, match=r"the state (holds|keeps|was made)"):
        extended(other, new, state)
    same = tokens(3)
    assert torch.equal(extended(own, same, state), extended(own, same, untouched))


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
