"""What the contract does not ask of attention to a window and one key beside it."""

import pytest
import torch

from attention.cases import HIDDEN, LENGTH, Case
from polysketch import attention

SKETCHES = {
    "polysketch-window": {"sketch_size": 4},
    "polysketch": {"sketch_size": 4},
}
CASES = [Case(name, {"window": 6, **sizes, "hidden_size": HIDDEN}) for name, sizes in SKETCHES.items()]
EACH = pytest.mark.parametrize("case", CASES, ids=str)
SIZES = {"window": 6, "sketch_size": 4}


@EACH
def test_decoding_takes_unrotated_vectors_too(case: Case):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    unrotated = case.inputs(seed=7)[:2]
    whole = mechanism(query, key, value, hidden=hidden, unrotated=unrotated)
    assert not torch.allclose(whole, mechanism(query, key, value, hidden=hidden))
    state, outputs = mechanism.init_state(query.shape[0]), []
    for part in torch.arange(LENGTH).split([9, 1, 1, 15, 11]):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        output, state = mechanism.extend(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            state,
            hidden=hidden[:, rows],
            unrotated=(unrotated[0][:, :, rows], unrotated[1][:, :, rows]),
        )
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), whole)


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_under_autocast_is_that_of_float32_within_rounding(case: Case, dtype: torch.dtype):
    """A float32 state under float16 autocast once gave NaN: the first tokens have no key beside their window."""
    mechanism, (query, key, value, hidden) = case.build(dtype=torch.float32), case.inputs(dtype=torch.float32)
    expected = mechanism(query, key, value, hidden=hidden)
    with torch.autocast("cpu", dtype):
        output, _ = mechanism.extend(query, key, value, mechanism.init_state(query.shape[0]), hidden=hidden)
        whole = mechanism(query, key, value, hidden=hidden)
    for found in (output, whole):
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "far_bias"), [("polysketch-window", -6.0), ("polysketch", -2.0)])
def test_small_far_shares_keep_their_gradients_in_bfloat16(name: str, far_bias: float):
    case = Case(name, {"window": 6, **SKETCHES[name], "far_bias": far_bias, "hidden_size": HIDDEN})
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value, hidden = (x.to(dtype) for x in case.inputs())
        value = value.requires_grad_()
        case.build(dtype=torch.float32).to(dtype)(query, key, value, hidden=hidden)[:, :, -1].sum().backward()
        gradients.append(value.grad[:, :, : LENGTH - 6].float())
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert error < 0.03, error


def test_shares_of_float16_do_not_overflow():
    mechanism = attention.build("polysketch-window", num_heads=1, head_dim=8, window=2, sketch_size=4, far_bias=6.0)
    query, key = torch.randn(2, 40, 1, 2_000, 8, generator=torch.Generator().manual_seed(0)).half().unbind()
    assert 0.99 < mechanism.half().prefix_share(query, key).item() <= 1.0


@EACH
def test_a_refused_call_leaves_the_state_as_it_was(case: Case):
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    state = mechanism.init_state(query.shape[0])
    with pytest.raises(ValueError, match="needs hidden"):
        mechanism.extend(query, key, value, state)
    assert state.position.eq(0).all()
    assert state.far.sums.eq(0).all()


def test_masses_too_small_for_their_reciprocal_keep_gradients_finite():
    torch.manual_seed(0)
    mechanism = attention.build("polysketch-window", num_heads=2, head_dim=16, window=4, sketch_size=24)
    mechanism.feature_map.log_sharpness.data.fill_(4.5)
    inputs = [torch.randn(1, 2, 60, 16, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        codes = mechanism.feature_map.map_both(*inputs[:2])
        assert (mechanism.feature_map.weights(*codes).double() < 1e-39).any()
    for gradient in torch.autograd.grad(mechanism(*inputs).sum(), (*inputs, *mechanism.feature_map.parameters())):
        assert gradient.isfinite().all()


@EACH
def test_what_stands_at_masked_tokens_does_not_matter(case: Case):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    mask = torch.ones(value.shape[0], LENGTH, dtype=torch.bool)
    mask[0, :5], mask[1, 9] = False, False
    spoiled = value.masked_fill(~mask[:, None, :, None], float("nan"))
    expected = mechanism(query, key, value, hidden=hidden, key_mask=mask)
    real = mask[:, None, :, None].expand_as(expected)
    found = mechanism(query, key, spoiled, hidden=hidden, key_mask=mask)
    decoded, _ = mechanism.extend(query, key, spoiled, mechanism.init_state(2), hidden=hidden, key_mask=mask)
    for output in (found, decoded):
        torch.testing.assert_close(output[real], expected[real])


@EACH
@pytest.mark.parametrize("wrong", ["value", "query", "hidden"])
def test_no_refused_call_moves_the_window(case: Case, wrong: str):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    state = mechanism.init_state(2)
    given = {"query": query[:, :, :1], "key": key[:, :, :1], "value": value[:, :, :1], "hidden": hidden[:, :1]}
    given[wrong] = {"value": value[:, :, :1, :5], "query": query[:, :, :2], "hidden": hidden[:, :2]}[wrong]
    with pytest.raises(ValueError, match=r"the state takes|as many queries|hidden must be"):
        mechanism.extend(given["query"], given["key"], given["value"], state, hidden=given["hidden"])
    assert state.position.eq(0).all()
    assert state.far.sums.eq(0).all()


@EACH
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("other", [{"window": 5}, {"num_kv_heads": 1}, {"sketch_size": 2}])
def test_a_state_of_other_sizes_is_refused_before_anything_is_read(case: Case, other: dict, tokens: int):
    """A program reads memory by the sizes of its mechanism."""
    mechanism = attention.build(case.name, num_heads=2, head_dim=8, **SIZES)
    stranger = attention.build(case.name, num_heads=2, head_dim=8, **{**SIZES, **other})
    state = stranger.init_state(2)
    torch.manual_seed(1)
    heads = [2, stranger.num_kv_heads, stranger.num_kv_heads]
    for filled in (False, True):
        if filled:
            stranger.extend(*(torch.randn(2, each, 12, 8) for each in heads), state)
        before = state.position.clone()
        with pytest.raises(ValueError, match="made by a mechanism of other sizes"):
            mechanism.extend(*torch.randn(3, 2, 2, tokens, 8), state)
        assert state.position.equal(before)


@EACH
@pytest.mark.parametrize("place", [(slice(1),), (slice(None), slice(1)), (..., slice(4))])
def test_unrotated_vectors_of_another_shape_are_refused(case: Case, place: tuple):
    mechanism = attention.build(case.name, num_heads=2, head_dim=8, **SIZES)
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 2, 12, 8)
    state = mechanism.init_state(2)
    mechanism.extend(query, key, value, state)
    one = [x[:, :, :1] for x in (query, key, value)]
    for vectors in ((one[0][place], one[1]), (one[0], one[1][place])):
        with pytest.raises(ValueError, match="unrotated must be"):
            mechanism.extend(*one, state, unrotated=vectors)
    with pytest.raises(ValueError, match="unrotated must be"):
        mechanism(query, key, value, unrotated=(query[place], key[place]))
    assert state.position.eq(12).all()
