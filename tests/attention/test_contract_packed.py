"""Documents packed into one row: each gives what it gives alone, for every mechanism."""

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, HEAD_DIM, HEADS, Case, directed
from attention.test_contract import TIGHT
from polysketch import attention

# Around chunks of 8 tokens, of one token, of many; 7, 8 and 9 are one padded batch.
LENGTHS = [9, 1, 8, 37, 7, 1, 20]
EQUAL = [12, 12, 12]

RUNS = directed(CASES)
EACH = directed(CASES, every=False)


def offsets(lengths: list[int]) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def given_to(mechanism: attention.Mechanism, case: Case, lengths: list[int], seed: int = 1) -> list[Tensor]:
    """Query, key, value, hidden where it is read, query and key without positions where they are."""
    *vectors, hidden = case.inputs(batch=1, length=sum(lengths), seed=seed)
    unrotated = case.inputs(batch=1, length=sum(lengths), seed=seed + 10)[:2]
    return [*vectors, *[hidden] * mechanism.reads_hidden, *list(unrotated) * mechanism.reads_unrotated]


def named(mechanism: attention.Mechanism, others: list[Tensor]) -> dict:
    """What follows query, key and value, by name."""
    hidden = {"hidden": others[0]} if mechanism.reads_hidden else {}
    return hidden | ({"unrotated": tuple(others[-2:])} if mechanism.reads_unrotated else {})


def packed(mechanism: attention.Mechanism, tensors: list[Tensor], lengths: list[int], causal: bool) -> Tensor:
    options = named(mechanism, tensors[3:])
    return mechanism.forward_packed(*tensors[:3], offsets(lengths), causal=causal, **options)


def apart(mechanism: attention.Mechanism, tensors: list[Tensor], lengths: list[int], causal: bool) -> Tensor:
    """Every document by itself."""
    every = zip(*(x.split(lengths, -2) for x in tensors), strict=True)
    return torch.cat([mechanism(*x[:3], causal=causal, **named(mechanism, list(x[3:]))) for x in every], 2)


@pytest.mark.parametrize(
    ("case", "causal", "lengths"),
    [
        pytest.param(*one.values, lengths, id=f"{one.id} {name}", marks=one.marks)
        for runs, lengths, name in ((RUNS, LENGTHS, "unequal"), (EACH, EQUAL, "equal"))
        for one in runs
    ],
)
def test_a_packed_row_equals_its_documents_apart(case: Case, causal: bool, lengths: list[int]):
    mechanism = case.build()
    tensors = [x.requires_grad_() for x in given_to(mechanism, case, lengths)]
    found, expected = (run(mechanism, tensors, lengths, causal) for run in (packed, apart))
    torch.testing.assert_close(found, expected, **TIGHT)
    wanted = [*tensors, *mechanism.parameters()]
    upstream = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(7))
    found_grads, expected_grads = (
        torch.autograd.grad(output, wanted, upstream, allow_unused=True, materialize_grads=True)
        for output in (found, expected)
    )
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("changed", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(("case", "causal"), EACH)
def test_changing_one_document_changes_no_bit_of_another(case: Case, causal: bool, changed: int):
    mechanism = case.build()
    ones, others = (given_to(mechanism, case, LENGTHS, seed) for seed in (1, 2))
    is_changed = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) == changed
    mixed = [torch.where(is_changed[:, None], other, one) for one, other in zip(ones, others, strict=True)]
    before, after = (packed(mechanism, tensors, LENGTHS, causal) for tensors in (ones, mixed))
    assert torch.equal(before[:, :, ~is_changed], after[:, :, ~is_changed])
    assert (before[:, :, is_changed] - after[:, :, is_changed]).abs().amax(-1).min() > 1e-6


def test_offsets_and_tensors_that_do_not_fit_are_refused(case: Case):
    mechanism = case.build()
    tensors = given_to(mechanism, case, EQUAL)
    with pytest.raises(ValueError, match="must end at the length of the row, 36, got 24"):
        packed(mechanism, tensors, EQUAL[:2], mechanism.is_causal)
    with pytest.raises(ValueError, match="a batch of 1 is expected, got 2 rows"):
        packed(mechanism, [x.expand(2, *x.shape[1:]) for x in tensors], EQUAL, mechanism.is_causal)
    with pytest.raises(ValueError, match="must rise"):
        packed(mechanism, tensors, [12, 0, 24], mechanism.is_causal)
    with pytest.raises(ValueError, match=rf"must be \(batch, {HEADS}, length, {HEAD_DIM}\)"):
        packed(mechanism, [tensors[0][:, :3], *tensors[1:]], EQUAL, mechanism.is_causal)
