"""A sequence given in spans, each with the state of the one before: what it gives whole, gradients too."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.cases import COMPLETE_CAUSAL_CASES, HEAD_DIM, HEADS, LENGTH, Case, one_of_each, others_full
from polysketch import attention

TIGHT = {"rtol": 1e-8, "atol": 1e-9}
EXACT = {"softmax", "polynomial", "squared-polynomial", "hyper", "polysketch-heavy"}
"""Those whose state is every token, or passes no gradients."""


def can(case: Case) -> bool:
    """Whether there is a state of constant size that gradients pass through."""
    return case.name not in EXACT or bool(case.options.get("linear"))


CASES = [case for case in COMPLETE_CAUSAL_CASES if can(case)]
SPLITS = [[1, 7, 1, 1, 20, 7], [8, 8, 8, 8, 5], [LENGTH - 1, 1]]


def unrotated(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], span: slice) -> dict:
    """Other queries and keys as those before rotary positions, where the mechanism reads them."""
    if not mechanism.reads_unrotated:
        return {}
    query, key = inputs[0].roll(1, 3) * 0.9, inputs[1].roll(1, 3) * 1.1
    return {"unrotated": (query[:, :, span], key[:, :, span])}


def forward_spans(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    """The output of `forward_span` over a sequence split into spans of these sizes."""
    state = mechanism.init_span(inputs[0].shape[0], dtype=inputs[0].dtype)
    shapes, outputs, start = {name: x.shape for name, x in state.tensors.items()}, [], 0
    for size in sizes:
        span = slice(start, start + size)
        query, key, value = (x[:, :, span] for x in inputs[:3])
        given = unrotated(mechanism, inputs, span)
        output, state = mechanism.forward_span(query, key, value, state, hidden=inputs[3][:, span], **given)
        outputs.append(output)
        start += size
        assert state.position == start
        assert {name: x.shape for name, x in state.tensors.items()} == shapes
    return torch.cat(outputs, 2)


def gradients(mechanism: attention.Mechanism, output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of all inputs and parameters, for an output that is weighed by place."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    learned = [x for x in mechanism.parameters() if x.requires_grad]
    found = torch.autograd.grad((output * weights).sum(), [*inputs, *learned], allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in found]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param(*one.values, sizes, id=f"{one.values[0]} {sizes}", marks=[*one.marks, *more])
        for cases, sizes, more in (
            (others_full(CASES), SPLITS[0], ()),
            (one_of_each(CASES), SPLITS[1], ()),
            (others_full(CASES), SPLITS[2], (pytest.mark.full,)),
        )
        for one in cases
    ],
)
def test_spans_with_states_give_what_the_whole_gives(case: Case, sizes: list[int]):
    mechanism = case.build()
    inputs = [x.clone().requires_grad_() for x in case.inputs()]
    given = unrotated(mechanism, tuple(inputs), slice(None))
    whole = mechanism(*inputs[:3], hidden=inputs[3], **given)
    parts = forward_spans(mechanism, tuple(inputs), sizes)
    torch.testing.assert_close(parts, whole, **TIGHT)
    expected, found = (gradients(mechanism, x, inputs) for x in (whole, parts))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("case", others_full([case for case in CASES if case.name != "local"]), ids=str)
def test_a_span_hears_of_the_last_token_before_it_through_the_state_alone(case: Case):
    """Tokens one place before the span matter by value and by gradient: a state that is cut off is seen here."""
    mechanism, inputs = case.build(), case.inputs()
    value = inputs[2].clone().requires_grad_()
    output = forward_spans(mechanism, (*inputs[:2], value, inputs[3]), [17, LENGTH - 17])
    (grad,) = torch.autograd.grad(output[:, :, 17].square().sum(), value)
    assert (grad[:, :, 16].abs().sum(-1) > 0).all()
    assert not grad[:, :, 18:].any()


@pytest.mark.parametrize("case", [case for case in COMPLETE_CAUSAL_CASES if not can(case)], ids=str)
def test_a_mechanism_without_such_a_state_says_so_by_name(case: Case):
    mechanism = case.build()
    with pytest.raises(NotImplementedError, match=type(mechanism).__name__):
        mechanism.init_span(2)
    with pytest.raises(NotImplementedError, match=type(mechanism).__name__):
        mechanism.forward_span(*case.inputs()[:3], attention.SpanState())


def test_a_detached_state_gives_the_same_numbers_and_no_gradient():
    mechanism = attention.build("polysketch", num_heads=HEADS, head_dim=HEAD_DIM, window=4, sketch_size=4).double()
    tensors = [x.requires_grad_() for x in CASES[0].inputs()[:3]]
    early, late = ([x[:, :, part] for x in tensors] for part in (slice(0, 20), slice(20, LENGTH)))
    _, state = mechanism.forward_span(*early, mechanism.init_span(2, dtype=torch.float64))
    linked, _ = mechanism.forward_span(*late, state)
    cut, _ = mechanism.forward_span(*late, state.detach())
    torch.testing.assert_close(cut, linked, rtol=0, atol=0)
    for output, reaches_back in ((linked, True), (cut, False)):
        (grad,) = torch.autograd.grad(output.sum(), tensors[2], retain_graph=True)
        assert bool(grad[:, :, :20].any()) == reaches_back


def test_pairs_of_neighbouring_splits_agree_in_float32():
    """The programs of a CPU too, whose arithmetic float64 does not run."""
    case = next(case for case in CASES if case.name == "polysketch")
    mechanism, inputs = case.build(dtype=torch.float32), case.inputs(dtype=torch.float32)
    found = [forward_spans(mechanism, inputs, sizes) for sizes in ([LENGTH], [9, 28], [20, 1, 16])]
    for one, other in pairwise(found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
