"""What holds for every mechanism; one is tested by being in the table `MECHANISMS`."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.cases import (
    BATCH,
    CASES,
    CAUSAL_CASES,
    COMPLETE_CAUSAL_CASES,
    HEAD_DIM,
    HEADS,
    LENGTH,
    Case,
    others_full,
)
from polysketch import attention, ops

TIGHT = {"rtol": 1e-8, "atol": 1e-9}
FULL = pytest.mark.full


def extend_over(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    """The output of `extend` over a sequence split into spans of these sizes."""
    query, key, value, hidden = inputs
    state, outputs, start = mechanism.init_state(query.shape[0], dtype=query.dtype), [], 0
    for size in sizes:
        span = slice(start, start + size)
        output, state = mechanism.extend(
            query[:, :, span], key[:, :, span], value[:, :, span], state, hidden=hidden[:, span]
        )
        outputs.append(output)
        start += size
    assert state.position.tolist() == [start] * query.shape[0]
    return torch.cat(outputs, dim=2)


def run(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], **options) -> Tensor:
    """The output, causal wherever the mechanism can be."""
    query, key, value, hidden = inputs
    return mechanism(query, key, value, hidden=hidden, **{"causal": mechanism.is_causal, **options})


def pad_left(tensors: tuple[Tensor, ...], row: int, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """`count` tokens of large garbage before each row; in `row` masked, elsewhere real. Returns also the mask."""
    padded = tuple(torch.nn.functional.pad(x, (0, 0, count, 0), value=50.0) for x in tensors)
    mask = torch.ones(BATCH, tensors[0].shape[2] + count, dtype=torch.bool)
    mask[row, :count] = False
    return padded, mask


def test_every_mechanism_of_the_table_has_a_case():
    assert {case.name for case in CASES} == set(attention.MECHANISMS)


@pytest.mark.parametrize("case", others_full([case for case in CASES if case.example.has_prefix]), ids=str)
def test_the_sketched_prefix_holds_a_third_to_two_thirds_of_the_mass(case: Case):
    mechanism = case.build()
    query, key, _, hidden = case.inputs()
    shares = mechanism.prefix_share(query, key, hidden=hidden)
    assert shares.shape == (HEADS,)
    assert shares.min() > 0.3
    assert shares.max() < 0.7


@pytest.mark.parametrize("changed", [24, *(pytest.param(n, marks=FULL) for n in (1, 11, LENGTH - 1))])
def test_changing_tokens_changes_nothing_before_them(causal_case: Case, changed: int):
    mechanism, inputs, others = causal_case.build(), causal_case.inputs(), causal_case.inputs(seed=2)
    mixed = tuple(
        torch.cat([x.narrow(-2, 0, changed), y.narrow(-2, changed, LENGTH - changed)], -2)
        for x, y in zip(inputs, others, strict=True)
    )
    before, after = run(mechanism, inputs), run(mechanism, mixed)
    torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], **TIGHT)
    assert (after[:, :, changed:] - before[:, :, changed:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("length", [1, *(pytest.param(n, marks=FULL) for n in (7, 8, 30)), 9])
def test_appending_tokens_changes_nothing_before_them(causal_case: Case, length: int):
    mechanism, inputs = causal_case.build(), causal_case.inputs()
    shorter = tuple(x.narrow(-2, 0, length) for x in inputs)
    torch.testing.assert_close(run(mechanism, shorter), run(mechanism, inputs)[:, :, :length], **TIGHT)


def test_the_last_token_sees_every_token_it_should_and_no_other(complete_causal_case: Case):
    mechanism, inputs = complete_causal_case.build(), complete_causal_case.inputs()
    value = inputs[2].clone().requires_grad_()
    output = run(mechanism, (*inputs[:2], value, inputs[3]))
    (grad,) = torch.autograd.grad(output[:, :, -1].square().sum(), value)
    seen = grad.abs().sum(-1) > 0
    assert seen[:, :, LENGTH - complete_causal_case.last_sees :].all()
    assert not seen[:, :, : LENGTH - complete_causal_case.last_sees].any()
    assert mechanism.reach is None or not seen[:, :, : -mechanism.reach].any()


def test_without_causal_the_first_token_sees_later_ones(complete_case: Case):
    mechanism, inputs, others = complete_case.build(), complete_case.inputs(), complete_case.inputs(seed=2)
    if not mechanism.is_bidirectional:
        with pytest.raises(ValueError, match="causal"):
            run(mechanism, inputs, causal=False)
        return
    for token in range(complete_case.first_sees - 1, min(complete_case.first_sees + 1, LENGTH)):
        only = (torch.arange(LENGTH) == token)[:, None]
        changed = (inputs[0], *(torch.where(only, y, x) for x, y in zip(inputs[1:3], others[1:3], strict=True)))
        first = [run(mechanism, (*x[:3], inputs[3]), causal=False)[:, :, 0] for x in (inputs, changed)]
        difference = (first[0] - first[1]).abs().amax(-1)
        assert bool((difference > 1e-7).all()) if token < complete_case.first_sees else not difference.any()


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 7, 1, 1, 20, 7],
        *(pytest.param(x, marks=FULL) for x in ([8, 8, 8, 8, 5], [1] * LENGTH, [LENGTH], [9, 1, 1, 1, 25])),
    ],
    ids=str,
)
def test_forward_equals_extend_over_a_split(complete_causal_case: Case, sizes: list[int]):
    mechanism, inputs = complete_causal_case.build(), complete_causal_case.inputs()
    torch.testing.assert_close(extend_over(mechanism, inputs, sizes), run(mechanism, inputs), **TIGHT)


@pytest.mark.parametrize("case", others_full(COMPLETE_CAUSAL_CASES), ids=str)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=9))
def test_forward_equals_extend_over_any_split(case: Case, cuts: set[int]):
    edges = [0, *sorted(cuts), LENGTH]
    sizes = [end - start for start, end in pairwise(edges)]
    mechanism, inputs = case.build(), case.inputs()
    torch.testing.assert_close(extend_over(mechanism, inputs, sizes), run(mechanism, inputs), **TIGHT)


@pytest.mark.parametrize("case", [case for case in CASES if case not in CAUSAL_CASES], ids=str)
def test_a_mechanism_that_cannot_be_causal_says_so_by_name(case: Case):
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    name = type(mechanism).__name__
    with pytest.raises(ValueError, match=f"{name} cannot be causal"):
        mechanism(query, key, value)
    with pytest.raises(NotImplementedError, match=f"{name} cannot decode"):
        mechanism.init_state(BATCH)
    with pytest.raises(NotImplementedError, match=f"{name} cannot decode"):
        mechanism.extend(query, key, value, None)


def test_rows_of_the_batch_do_not_influence_one_another(case: Case):
    mechanism, inputs = case.build(), case.inputs()
    alone = run(mechanism, tuple(x[1:] for x in inputs))
    torch.testing.assert_close(run(mechanism, inputs)[1:], alone, **TIGHT)


@pytest.mark.parametrize("count", [13, *(pytest.param(n, marks=FULL) for n in (1, 5, 8))])
def test_left_padding_changes_nothing(case: Case, count: int):
    mechanism, inputs = case.build(), case.inputs()
    padded, mask = pad_left(inputs, row=0, count=count)
    expected = run(mechanism, inputs)
    torch.testing.assert_close(run(mechanism, padded, key_mask=mask)[0, :, count:], expected[0], **TIGHT)
    assert run(mechanism, padded, key_mask=mask).isfinite().all()
    torch.testing.assert_close(run(mechanism, padded, key_mask=mask)[1], run(mechanism, padded)[1], **TIGHT)


@pytest.mark.parametrize("prefill", [pytest.param(6, marks=FULL), 20])
def test_left_padding_changes_nothing_when_decoding(complete_causal_case: Case, prefill: int):
    mechanism, inputs, count = complete_causal_case.build(), complete_causal_case.inputs(), 5
    padded, mask = pad_left(inputs, row=0, count=count)
    state, outputs = mechanism.init_state(BATCH, dtype=torch.float64), []
    for start, end in ((0, prefill), *((i, i + 1) for i in range(prefill, LENGTH + count))):
        query, key, value, hidden = (x.narrow(-2, start, end - start) for x in padded)
        given_mask = mask[:, start:end] if start == 0 else None
        output, state = mechanism.extend(query, key, value, state, key_mask=given_mask, hidden=hidden)
        outputs.append(output)
    assert state.position.tolist() == [LENGTH, LENGTH + count]
    output = torch.cat(outputs, 2)
    torch.testing.assert_close(output[0, :, count:], run(mechanism, inputs)[0], **TIGHT)
    torch.testing.assert_close(output[1], run(mechanism, padded)[1], **TIGHT)


@pytest.mark.parametrize("size", [pytest.param(1, marks=FULL), 3])
def test_masked_tokens_of_a_row_that_has_started_keep_their_places_when_decoding(complete_causal_case: Case, size: int):
    mechanism, (query, key, value, hidden) = complete_causal_case.build(), complete_causal_case.inputs()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 18:20] = mask[1, 31:] = False
    state, outputs = mechanism.init_state(BATCH, dtype=query.dtype), []
    for start in range(0, LENGTH, size):
        span = slice(start, start + size)
        parts = (x[:, :, span] for x in (query, key, value))
        output, state = mechanism.extend(*parts, state, key_mask=mask[:, span], hidden=hidden[:, span])
        outputs.append(output)
    expected = run(mechanism, (query, key, value, hidden), key_mask=mask)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, **TIGHT)


def test_masked_tokens_in_the_middle_have_no_weight(case: Case):
    mechanism, inputs, others = case.build(), case.inputs(), case.inputs(seed=2)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[:, [9, 10, 20]] = False
    changed = (
        inputs[0],
        *(torch.where(mask[:, None, :, None], x, y) for x, y in zip(inputs[1:3], others[1:3], strict=True)),
    )
    results = [run(mechanism, (*x[:3], inputs[3]), key_mask=mask) for x in (inputs, changed)]
    torch.testing.assert_close(results[0], results[1], **TIGHT)


def test_grouped_queries_equal_each_query_head_with_its_own_key_head(case: Case):
    grouped, (query, key, value, hidden) = case.build(), case.inputs()
    single = attention.build(case.name, num_heads=case.kv_heads, head_dim=HEAD_DIM, **case.options).double()
    single.load_state_dict(grouped.state_dict())
    group = HEADS // case.kv_heads
    output = run(grouped, (query, key, value, hidden))
    for member in range(group):
        expected = run(single, (query[:, member::group], key, value, hidden))
        torch.testing.assert_close(output[:, member::group], expected, **TIGHT)


def test_a_reloaded_mechanism_computes_the_same(case: Case):
    mechanism, other, inputs = case.build(), case.build(seed=5), case.inputs()
    if mechanism.state_dict() and case.draws_matter:
        assert not torch.allclose(run(other, inputs), run(mechanism, inputs))
    other.load_state_dict(mechanism.state_dict())
    assert torch.equal(run(other, inputs), run(mechanism, inputs))


def test_gradients_reach_every_parameter_and_input(case: Case):
    mechanism = case.build()
    inputs = tuple(x.requires_grad_() for x in case.inputs())
    run(mechanism, inputs).square().sum().backward()
    tensors = dict(mechanism.named_parameters()) | dict(zip("qkv", inputs, strict=False))
    tensors |= {"hidden": inputs[3]} if mechanism.reads_hidden else {}
    unreached = [name for name, x in tensors.items() if x.grad is None or not bool(x.grad.abs().sum() > 0)]
    assert unreached == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_and_the_width_of_value(case: Case, dtype: torch.dtype):
    mechanism = case.build(dtype=torch.float32).to(dtype)
    query, key, value, hidden = case.inputs(dtype=dtype)
    output = run(mechanism, (query, key, value[..., :3], hidden))
    assert output.dtype == dtype
    assert output.shape == (BATCH, HEADS, LENGTH, 3)
    assert output.isfinite().all()


def test_autocast_gives_the_autocast_dtype_close_to_full_precision(complete_case: Case):
    mechanism, inputs = complete_case.build(dtype=torch.float32), complete_case.inputs(dtype=torch.float32)
    exact = run(mechanism, inputs)
    query, key, value = (x.bfloat16() for x in inputs[:3])
    with torch.autocast("cpu", torch.bfloat16):
        output = run(mechanism, (query, key, value, inputs[3]))
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).norm() < 0.05 * exact.norm()


def test_decoding_under_autocast_is_close_to_full_precision(complete_causal_case: Case):
    mechanism, inputs = (
        complete_causal_case.build(dtype=torch.float32),
        complete_causal_case.inputs(dtype=torch.float32),
    )
    exact = run(mechanism, inputs)
    query, key, value = (x.bfloat16() for x in inputs[:3])
    with torch.autocast("cpu", torch.bfloat16):
        state = mechanism.init_state(BATCH)
        first, state = mechanism.extend(*(x[:, :, :20] for x in (query, key, value)), state, hidden=inputs[3][:, :20])
        rest, _ = mechanism.extend(*(x[:, :, 20:] for x in (query, key, value)), state, hidden=inputs[3][:, 20:])
    assert (torch.cat([first, rest], 2).float() - exact).norm() < 0.05 * exact.norm()


def test_a_cloned_state_goes_its_own_way(causal_case: Case):
    mechanism, inputs, others = causal_case.build(), causal_case.inputs(), causal_case.inputs(seed=2)
    head, tail = (tuple(x.narrow(-2, *span) for x in inputs) for span in ((0, 20), (20, 10)))
    other_tail = tuple(x.narrow(-2, 20, 10) for x in others)
    _, state = mechanism.extend(*head[:3], mechanism.init_state(BATCH, dtype=torch.float64), hidden=head[3])
    kept, nbytes = state.clone(), state.nbytes
    expected, _ = mechanism.extend(*tail[:3], state, hidden=tail[3])
    wrong, _ = mechanism.extend(*other_tail[:3], kept.clone(), hidden=other_tail[3])
    again, _ = mechanism.extend(*tail[:3], kept, hidden=tail[3])
    assert torch.equal(again, expected)
    assert not torch.allclose(wrong, expected)
    assert nbytes > 0


def test_a_reordered_state_continues_the_rows_named(causal_case: Case):
    mechanism, inputs, indices = causal_case.build(), causal_case.inputs(), torch.tensor([1, 1, 0])
    head, tail = (tuple(x.narrow(-2, *span) for x in inputs) for span in ((0, 20), (20, 10)))
    _, state = mechanism.extend(*head[:3], mechanism.init_state(BATCH, dtype=torch.float64), hidden=head[3])
    query, key, value, hidden = (x[indices] for x in tail)
    output, _ = mechanism.extend(query, key, value, state.reorder(indices), hidden=hidden)
    expected, _ = mechanism.extend(*tail[:3], state, hidden=tail[3])
    torch.testing.assert_close(output, expected[indices], **TIGHT)


def test_a_state_of_sums_has_the_dtype_of_the_mechanisms_own_tensors(causal_case: Case):
    mechanism = causal_case.build()
    state, own = mechanism.init_state(BATCH), (*mechanism.parameters(), *mechanism.buffers())
    if not isinstance(state, ops.LinearAttentionState):
        pytest.skip("the state takes the dtype of the first keys")
    expected = torch.float64 if any(x.is_floating_point() for x in own) else torch.float32
    assert state.sums.dtype == state.open_value.dtype == expected


def test_extend_has_no_gradient(causal_case: Case):
    mechanism, inputs = causal_case.build(), tuple(x.requires_grad_() for x in causal_case.inputs())
    output, _ = mechanism.extend(*inputs[:3], mechanism.init_state(BATCH, dtype=torch.float64), hidden=inputs[3])
    assert not output.requires_grad


def test_the_representation_names_the_sizes(case: Case):
    text = repr(case.build())
    assert f"num_heads={HEADS}" in text
    assert f"head_dim={HEAD_DIM}" in text
    assert "degree" not in case.options or f"degree={case.options['degree']}" in text


def test_tensors_of_other_heads_or_widths_are_refused(case: Case):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    for wrong in ((query[:, :3], key, value), (query, key[..., :5], value), (query, key, value[:, :0])):
        with pytest.raises(ValueError, match=r"must be \(batch"):
            run(mechanism, (*wrong, hidden))


def test_an_unknown_option_is_refused_with_the_list_of_those_that_exist(case: Case):
    with pytest.raises(ValueError, match=r"has no option 'sketchsize'; it takes"):
        attention.build(case.name, num_heads=2, head_dim=8, sketchsize=3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 0), (0, 1), (2, 4)])
def test_heads_that_do_not_divide_are_refused(case: Case, heads: int, kv_heads: int):
    options = {**case.options} | ({"prefix_gain": 0.5} if "prefix_gain" in case.options else {})
    with pytest.raises(ValueError, match=r"num_heads|num_kv_heads"):
        attention.build(case.name, num_heads=heads, head_dim=8, num_kv_heads=kv_heads, **options)
