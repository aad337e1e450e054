"""The Triton programs of linear attention compute what the reference defines: output, every gradient, states."""

from dataclasses import replace

import pytest
import torch

from ops.linear_cases import Case, assert_same, gradients, make, run

CASES = [
    Case(length=33, batch=1, heads=2),
    Case(length=37, decays=True, padded=True, batch=2, heads=2, key_heads=1),
    Case(local_chunk=0, decays=True, length=37, batch=1, heads=2, key_heads=1, chunk_size=16),
    Case(local_chunk=0, padded=True, length=33, heads=2, key_heads=1, chunk_size=16, features=16),
    Case(power=1, local_chunk=16, decays=True, length=33, batch=1, heads=2, key_heads=1),
    Case(power=1, local_chunk=0, decays=True, padded=True, length=33, heads=2, key_heads=2, chunk_size=16),
    Case(power=1, local_chunk=0, features=40, length=40, batch=1, heads=1, key_heads=1, normalize=False, chunk_size=24),
    Case(local_chunk=20, degree=2, length=41, batch=1, heads=2, key_heads=2, normalize=False),
    Case(local_chunk=40, degree=6, length=63, batch=1, heads=2, key_heads=1, offset=0.0),
    Case(features=48, length=1, batch=1, heads=1, key_heads=1),
    Case(causal=False, length=33, batch=1, heads=2, key_heads=1, padded=True),
    Case(causal=False, power=1, local_chunk=0, length=33, batch=1, heads=2, key_heads=1, padded=True),
    Case(causal=False, local_chunk=0, length=35, batch=1, heads=2, key_heads=1, normalize=False),
]
WITH_HISTORY = [
    Case(length=33, history=21, batch=1, heads=2, key_heads=1),
    Case(length=5, history=13, decays=True, batch=2, heads=2, key_heads=2),
    Case(power=1, local_chunk=16, length=33, history=16, decays=True, padded=True, heads=2, key_heads=1),
    Case(local_chunk=0, length=33, history=21, decays=True, batch=1, heads=1, key_heads=1),
]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_triton_agrees(case: Case, tolerance: float = 2e-5) -> None:
    """float32 against the reference in float64."""
    rounded = make(replace(case, dtype=torch.float32))
    state = exact_state = None
    if case.history:
        before = make(replace(case, seed=case.seed + 1, padded=False, dtype=torch.float32), case.history)
        state = run(case, before, backend="reference", return_state=True).state
        exact = before.map(lambda x: x if x.dtype == torch.bool else x.double())
        exact_state = run(case, exact, backend="reference", return_state=True).state
    doubled = rounded.map(lambda x: x if x.dtype == torch.bool else x.double())
    assert_same(
        gradients(case, rounded, "triton", state), gradients(case, doubled, "reference", exact_state), tolerance
    )


@pytest.mark.parametrize("case", CASES + WITH_HISTORY, ids=str)
def test_programs_agree_with_the_reference(case):
    assert_triton_agrees(case)
