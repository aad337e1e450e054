"""A sequence in several spans at once gives what one span after another gives: outputs, gradients, states."""

import pytest
import torch

from attention.covering import first_always
from ops.linear_cases import Case, assert_backends_agree, make, relative_error, run
from ops.test_linear_backends import PAIRWISE, WITH_HISTORY
from ops.test_native import assert_native_agrees, needs_compiler
from polysketch.ops.linear import spans

CASES = [case for case in PAIRWISE + WITH_HISTORY if case.causal or case.local_chunk]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.full), 3, pytest.param(5, marks=pytest.mark.full)])
def cuts(request, monkeypatch) -> list[int]:
    """Every call by chunks runs in so many spans if it can; the numbers of spans that calls ran in."""
    found = []
    original = spans.Cut.of

    def spy(*arguments):
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(spans.Cut, "of", spy)
    monkeypatch.setattr(spans, "num_spans", lambda *_: request.param)
    return found


def assert_ran_in_spans(case: Case, cuts: list) -> None:
    """At least one call had as many spans as there are chunks for."""
    if not case.local_chunk and (case.block_size or 1) > 256:
        return  # a block is a span of its own, whatever the number of workers
    chunk = case.local_chunk or case.compute_chunk or case.length
    assert max(cut.count for cut in cuts) >= min(2, -(-case.length // chunk))


@pytest.mark.parametrize("case", first_always(CASES[::-1], 20), ids=str)
def test_chunked_in_spans_agrees_with_the_reference(case, cuts):
    assert_backends_agree(case)
    assert_ran_in_spans(case, cuts)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_in_spans_agrees_with_the_reference(case, cuts):
    assert_native_agrees(case)
    assert_ran_in_spans(case, cuts)


def test_strong_decay_over_many_spans_neither_overflows_nor_is_lost(monkeypatch):
    case = Case(local_chunk=0, decays=True, length=200, compute_chunk=8, batch=1)
    tensors = make(case)
    tensors.log_decay *= 2000  # some spans are forgotten wholly, others hardly
    tensors.log_decay[:, :, 50:150] = -0.001
    expected = run(case, tensors, backend="reference").output
    monkeypatch.setattr(spans, "num_spans", lambda *_: 20)
    assert relative_error(run(case, tensors).output, expected) < 1e-10


@pytest.mark.parametrize(
    ("workers", "batch", "heads", "length", "expected"),
    [
        (8, 1, 1, 65_536, 8),
        (8, 1, 3, 65_536, 2),
        (8, 2, 4, 65_536, 1),
        (8, 1, 5, 65_536, 1),
        (8, 1, 1, 16_384, 4),
        (8, 1, 1, 8_000, 1),
    ],
)
def test_spans_are_as_many_as_keep_the_workers_busy(monkeypatch, workers, batch, heads, length, expected):
    monkeypatch.setattr(spans, "num_workers", lambda device: workers)
    assert spans.num_spans(torch.empty(batch, heads, length, 1), 256) == expected
