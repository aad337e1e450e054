"""The state for tracers: what `forward_span` gives by it, whose position is a tensor, in plain PyTorch alone."""

import pytest
import torch
from torch import Tensor

from attention.cases import LENGTH, Case, others_full
from attention.covering import first_always
from attention.test_contract_spans import CASES, SPLITS, unrotated
from polysketch import attention
from polysketch.attention.traced_state import TracedState
from polysketch.attention.traced_sums import first_tensors

TIGHT = {"rtol": 1e-8, "atol": 1e-9}
ONE_BY_ONE = [1] * LENGTH


def first(mechanism: attention.Mechanism) -> dict[str, Tensor]:
    """The tensors before the first token of two rows."""
    return first_tensors(mechanism.init_span(2, dtype=torch.float64).tensors)


def extend(
    mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], span: slice, tensors: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the tokens in `span`, and the tensors after them."""
    query, key, value, hidden = (x[:, :, span] if x.dim() == 4 else x[:, span] for x in inputs)
    state = TracedState(torch.tensor(span.start), tensors)
    given = unrotated(mechanism, inputs, span)
    output, after = mechanism.forward_span(query, key, value, state, hidden=hidden, **given)
    assert int(after.position) == span.stop
    return output, after.tensors


@torch.no_grad()
@pytest.mark.parametrize("sizes", first_always([*SPLITS, ONE_BY_ONE]), ids=str)
@pytest.mark.parametrize("case", others_full(CASES), ids=str)
def test_any_split_gives_what_the_whole_gives_with_a_state_of_one_size(case: Case, sizes: list[int]):
    mechanism, inputs = case.build(), case.inputs()
    tensors, outputs, shapes, start = first(mechanism), [], set(), 0
    for size in sizes:
        output, tensors = extend(mechanism, inputs, slice(start, start + size), tensors)
        outputs.append(output)
        shapes.add(tuple((name, x.shape) for name, x in sorted(tensors.items())))
        start += size
    assert len(shapes) == 1
    whole = mechanism(*inputs[:3], hidden=inputs[3], **unrotated(mechanism, inputs, slice(None)))
    torch.testing.assert_close(torch.cat(outputs, 2), whole, **TIGHT)


@torch.no_grad()
@pytest.mark.parametrize("case", others_full(CASES), ids=str)
def test_every_tensor_of_the_state_is_heard_of(case: Case):
    """Each that is lost in the middle of a chunk, or of a window, changes what follows."""
    mechanism, inputs = case.build(), case.inputs()
    _, tensors = extend(mechanism, inputs, slice(0, 21), first(mechanism))
    rest = slice(21, LENGTH)
    whole, _ = extend(mechanism, inputs, rest, tensors)
    for name in tensors:
        if name == "normalizer" and not getattr(mechanism, "normalize", True):
            continue  # what is not divided by
        if name == "normalizer" and case.name in ("focused", "polarity"):
            continue  # their values have a column of ones
        lost, _ = extend(mechanism, inputs, rest, {**tensors, name: torch.zeros_like(tensors[name])})
        assert (lost - whole).abs().max() > 1e-4 * whole.abs().max(), name
