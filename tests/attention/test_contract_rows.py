"""NaN and inf in one row of a batch, or in one document of a packed row: no bit of another one changes."""

import pytest
import torch
from torch import Tensor

from attention.cases import CAUSAL_CASES, Case, one_of_each
from attention.test_contract_packed import EACH, LENGTHS, named, packed
from attention.test_contract_packed import given_to as packed_row
from polysketch import attention

NAN = float("nan")
NUMBERS = [NAN, pytest.param(float("inf"), marks=pytest.mark.full)]
ROWS, SPOILED = 3, 1
OTHERS = [0, 2]


def given_to(mechanism: attention.Mechanism, case: Case) -> list[Tensor]:
    """Query, key, value, hidden where it is read, query and key without positions where they are."""
    *vectors, hidden = case.inputs(batch=ROWS)
    unrotated = case.inputs(batch=ROWS, seed=11)[:2]
    return [*vectors, *[hidden] * mechanism.reads_hidden, *list(unrotated) * mechanism.reads_unrotated]


def spoiled(tensors: list[Tensor], number: float) -> list[Tensor]:
    """With a whole row of a number."""
    row = torch.arange(ROWS) == SPOILED
    return [x.masked_fill(row.view(-1, *[1] * (x.dim() - 1)), number) for x in tensors]


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(7))
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def of_batch(mechanism: attention.Mechanism, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    return with_gradients(mechanism(*inputs[:3], causal=causal, **named(mechanism, inputs[3:])), inputs)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("case", "causal"), EACH)
def test_a_row_of_the_batch_stays_by_itself(case: Case, causal: bool, number: float):
    mechanism = case.build()
    tensors = given_to(mechanism, case)
    found, expected = (of_batch(mechanism, x, causal) for x in (spoiled(tensors, number), tensors))
    assert not found[0][SPOILED].isfinite().all()
    assert all(torch.equal(one[OTHERS], other[OTHERS]) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", one_of_each(CAUSAL_CASES), ids=str)
def test_a_row_stays_by_itself_when_decoding(case: Case, number: float):
    mechanism, outputs = case.build(), []
    tensors = given_to(mechanism, case)
    for given in (tensors, spoiled(tensors, number)):
        state, parts = mechanism.init_state(ROWS, dtype=torch.float64), []
        for start, stop in ((0, 12), (12, 13), (13, 14), (14, 37)):
            part = [x.narrow(-2, start, stop - start) for x in given]
            output, state = mechanism.extend(*part[:3], state, **named(mechanism, part[3:]))
            parts.append(output)
        outputs.append(torch.cat(parts, 2))
    assert not outputs[1][SPOILED].isfinite().all()
    assert torch.equal(outputs[0][OTHERS], outputs[1][OTHERS])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("case", "causal"), EACH)
def test_a_document_of_a_packed_row_stays_by_itself(case: Case, causal: bool, number: float):
    mechanism, spoiled_one = case.build(), 2  # one batch with those of 7 and 9 tokens
    tensors = packed_row(mechanism, case, LENGTHS)
    others = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) != spoiled_one
    found = []
    for given in (tensors, [x.masked_fill(~others[:, None], number) for x in tensors]):
        inputs = [x.clone().requires_grad_() for x in given]
        found.append(with_gradients(packed(mechanism, inputs, LENGTHS, causal), inputs))
    assert not found[1][0][:, :, ~others].isfinite().all()
    assert all(torch.equal(x[..., others, :], y[..., others, :]) for x, y in zip(*found, strict=True))


def test_a_mechanism_that_mixes_rows_is_found(monkeypatch):
    """Zero times the mean of all rows: a NaN alone can tell."""
    forward = attention.mechanism_class("linear").forward

    def mixing(self, query, key, value, **options):
        return forward(self, query, key, value + 0.0 * value.mean(0), **options)

    monkeypatch.setattr(attention.mechanism_class("linear"), "forward", mixing)
    with pytest.raises(AssertionError):
        test_a_row_of_the_batch_stays_by_itself(Case("linear"), True, NAN)
    with pytest.raises(AssertionError):
        test_a_document_of_a_packed_row_stays_by_itself(Case("linear"), True, NAN)
