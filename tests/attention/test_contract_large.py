"""Queries and keys of 1e4, queries of 1e18, zeros, equal keys: finite and near float64, but for what is named here."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from attention.cases import REPRESENTED, Case, one_of_each
from polysketch import attention

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
FULL_BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.full)
KINDS = ["queries of 1e4", "all of 1e4", "queries of 1e18", "zeros", "equal"]
HALF = [kind for kind in KINDS if kind != "queries of 1e18"]  # no number of float16
WITH_DTYPES = [
    *((kind, torch.float32) for kind in KINDS),
    ("all of 1e4", torch.float16),
    *(pytest.param(kind, torch.float16, marks=pytest.mark.full) for kind in HALF if kind != "all of 1e4"),
    *(pytest.param(kind, torch.bfloat16, marks=pytest.mark.full) for kind in KINDS),
]

# What is not so, and why. Names are parts of a case's name.
OUT_OF_RANGE = {
    ("queries of 1e18", "polarity"): "features are powers of entries of up to five, beyond float32",
    ("queries of 1e18", "kind=squared-relu"): "products of squares of 1e18 with keys are beyond float32",
    ("queries of 1e18", "nonnegative=True"): "features of LLOPS are entries to the power of four, beyond float32",
}
OTHER_NUMBERS = {
    ("all of 1e4", "hedgehog"): "weights below 1e-38 are zero in float32, and so is a row of only such weights",
    ("", "sample_size=5"): "which keys are sampled jumps with the last digit",
    ("equal", "learned=True"): "coefficients of 50 of either sign: sums of large numbers that cancel",
}


def reason(table: dict, kind: str, case: Case) -> str:
    """Why the case is an exception; empty where it is none."""
    return next((why for (of, part), why in table.items() if of in kind and part in str(case)), "")


def inputs_of(kind: str, case: Case, dtype: torch.dtype) -> list[Tensor]:
    query, key, value, hidden = case.inputs()
    of_query = {"queries of 1e4": 1e4, "all of 1e4": 1e4, "queries of 1e18": 1e18, "zeros": 0.0}.get(kind, 1.0)
    of_key = {"all of 1e4": 1e4, "zeros": 0.0}.get(kind, 1.0)
    query, key = of_query * query, of_key * key
    if kind == "equal":
        query, key = (x[:, :, :1].expand_as(x).contiguous() for x in (query, key))
    return [x.to(dtype) for x in (query, key, value, hidden)]


def outputs(mechanism: attention.Mechanism, given: list[Tensor]) -> list[Tensor]:
    """Of forward and of decoding."""
    query, key, value, hidden = given
    with torch.no_grad():
        found = [mechanism(query, key, value, hidden=hidden, causal=mechanism.is_causal)]
        if mechanism.is_causal:
            state = mechanism.init_state(len(query), dtype=torch.float64 if value.dtype == torch.float64 else None)
            found.append(mechanism.extend(query, key, value, state, hidden=hidden)[0])
    return found


@pytest.mark.parametrize(("kind", "dtype"), WITH_DTYPES, ids=str)
@pytest.mark.parametrize("case", REPRESENTED, ids=str)
def test_outputs_are_finite_and_near_those_of_float64(case: Case, kind: str, dtype: torch.dtype):
    mechanism, given = case.build(dtype=torch.float32).to(dtype), inputs_of(kind, case, dtype)
    exact = outputs(deepcopy(mechanism).double(), [x.double() for x in given])
    for found, wanted in zip(outputs(mechanism, given), exact, strict=True):
        assert wanted.isfinite().all()
        inside = wanted.abs() < 0.99 * torch.finfo(dtype).max
        if reason(OUT_OF_RANGE, kind, case):
            assert not found.isfinite().all()  # else it is no exception any more
            continue
        if reason(OTHER_NUMBERS, kind, case):
            continue
        assert found[inside].isfinite().all()
        least = given[2].double().norm() * 1e-3  # an output of hardly any mass is rounded as a part of the values
        assert (found[inside] - wanted[inside]).norm() <= BOUNDS[dtype] * (wanted[inside].norm() + least)


@pytest.mark.parametrize("dtype", [torch.float32, FULL_BFLOAT16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "1e18" not in kind])
@pytest.mark.parametrize("case", one_of_each(REPRESENTED), ids=str)
def test_gradients_are_finite(case: Case, kind: str, dtype: torch.dtype):
    mechanism = case.build(dtype=torch.float32).to(dtype)
    given = [x.requires_grad_() for x in inputs_of(kind, case, dtype)]
    output = mechanism(*given[:3], hidden=given[3], causal=mechanism.is_causal)
    upstream = torch.ones_like(output)
    leaves = [*given, *mechanism.parameters()]
    found = torch.autograd.grad(output, leaves, upstream, allow_unused=True, materialize_grads=True)
    assert all(x.isfinite().all() for x in found)
