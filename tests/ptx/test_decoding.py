"""The programs of one token, in bfloat16 for devices that are not here, against plain PyTorch in float64.

As in `test_programs.py` a CPU executes the PTX. States are float32; rows of a pool move on where they lie.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from device.test_rows import TOLERANCES
from ops.linear_cases import Case, Tensors, arguments, assert_same, empty_state, make, relative_error, run
from polysketch import ops
from polysketch.ops.delta.triton.decoding import extend_one_ as extend_delta
from polysketch.ops.delta.types import Inputs as DeltaInputs
from polysketch.ops.linear.checks import checked
from polysketch.ops.linear.self_check import as_a_row_of_others
from polysketch.ops.linear.triton.decoding import extend_one_
from polysketch.ops.window import reference
from polysketch.ops.window.triton import attend_one
from polysketch.ops.window.types import Inputs as WindowInputs
from polysketch.ops.window.types import Plan as WindowPlan

DTYPE = torch.bfloat16
TOLERANCE = TOLERANCES[DTYPE]
full = pytest.mark.full

SMALL = Case(length=4, batch=1, heads=2, key_heads=1, features=20, head_dim=12, value_dim=9, local_chunk=3, dtype=DTYPE)
LINEAR = [
    SMALL,
    replace(SMALL, power=1, local_chunk=0, decays=True, features=64, value_dim=64, length=3),
    replace(SMALL, features=32, head_dim=64, value_dim=64, local_chunk=5, decays=True, length=6),
    replace(SMALL, batch=2, heads=4, key_heads=2, features=33, value_dim=40, local_chunk=4, offset=0.0, length=6),
    replace(SMALL, power=1, factors=2, features=28, local_chunk=0, value_dim=65, length=3),
    replace(SMALL, power=1, factors=2, features=48, value_dim=64, decays=True, length=5),
    replace(SMALL, local_chunk=0, features=7, value_dim=128, normalize=False, length=3),
]


def started(case: Case) -> ops.LinearAttentionState:
    """A float32 state, or float64 for the exact case, after four tokens."""
    first = make(replace(case, seed=1), 4)
    return run(case, first, backend="reference", state=empty_state(case), return_state=True).state


def step(case: Case, one: Tensors, state: ops.LinearAttentionState | ops.StateRows) -> Tensor:
    """Output of one token by the programs."""
    call = {"causal": True, "block_size": None, "state": state, "return_state": True, "compute_chunk": None}
    return extend_one_(*checked(one.query, one.key, one.value, **arguments(case, one), **call), state)[0]


@pytest.mark.parametrize("case", [*LINEAR[:1], *(pytest.param(case, marks=full) for case in LINEAR[1:])], ids=str)
def test_steps_of_linear_attention_equal_those_of_plain_pytorch(case, launched):
    exact = replace(case, dtype=torch.float64)
    tensors, state, expected_state = make(case), started(replace(case, dtype=torch.float32)), started(exact)
    state.device_position = state.position.clone()
    for token in range(case.length):
        one = tensors.span(token, token + 1)
        wide = one.map(lambda x: x.double())
        given = (wide.query, wide.key, wide.value)
        expected = ops.linear_attention_extend_(*given, expected_state, **arguments(exact, wide))
        assert relative_error(step(case, one, state), expected.output) < TOLERANCE
    parts = ({name: x.double() for name, x in one.tensors().items() if x.numel()} for one in (state, expected_state))
    assert_same(*parts, TOLERANCE)
    assert launched.keys() == {"linear_extend", "linear_extend_finish"}


@full
@pytest.mark.parametrize("case", [LINEAR[0], LINEAR[1], LINEAR[5]], ids=str)
def test_a_row_of_a_pool_moves_on_as_it_would_alone(case, launched):
    alone = started(replace(case, dtype=torch.float32))
    pool = as_a_row_of_others(alone)
    for state in (alone, pool):
        state.device_position = state.position.clone()
    tensors = make(case)
    for token in range(case.length):
        one = tensors.span(token, token + 1)
        assert torch.equal(step(case, one, pool), step(case, one, alone))
    assert torch.equal(pool.pool.sums[pool.rows], alone.sums)
    assert launched


# Features, factors, width, query heads, whether in a pool.
DELTA = [(10, 2, 18, 2, False), (48, 2, 65, 1, True), (64, 1, 64, 2, True), (20, 1, 9, 1, False)]


@pytest.mark.parametrize("size", [*DELTA[:1], *(pytest.param(size, marks=full) for size in DELTA[1:])], ids=str)
def test_steps_of_the_delta_rule_equal_those_of_plain_pytorch(size, launched):
    """In float32, as the op computes."""
    features, factors, width, heads, pooled = size
    torch.manual_seed(0)
    exact = ops.LinearAttentionState.init(1, 1, features, width, factors=factors, dtype=torch.float64)
    exact.sums.normal_()
    state = replace(exact.clone(), sums=exact.sums.float(), normalizer=exact.normalizer.float())
    moved = as_a_row_of_others(state) if pooled else state
    for _ in range(3):
        query, key = (F.normalize(torch.randn(1, count, 1, features).double(), dim=-1) for count in (heads, 1))
        given = query, key, torch.randn(1, 1, 1, width).double(), torch.rand(1, 1, 1).double()
        expected = ops.delta_attention_extend_(*given, exact, factors=factors)
        found = extend_delta(query.float(), DeltaInputs(*(x.float() for x in given[1:])), moved, factors)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert launched.keys() == {"delta_extend"}


# Width, width of values, whether masked, whether one key stands beside.
WINDOWS = [(20, 18, True, True), (64, 64, False, True), (128, 128, True, False), (33, 1, False, False)]


@pytest.mark.parametrize("size", [*WINDOWS[:1], *(pytest.param(size, marks=full) for size in WINDOWS[1:])], ids=str)
def test_one_query_looks_into_rows_of_a_cache(size, launched):
    width, value_width, masked, beside = size
    torch.manual_seed(0)
    shapes = (2, 4, 1, width), (5, 2, 90, width), (5, 2, 90, value_width)
    query, key, value = (torch.randn(shape).to(DTYPE) for shape in shapes)
    mask = torch.rand(5, 93)[:, 3:] > 0.3 if masked else None
    more = (torch.randn(2, 4, 1).to(DTYPE), torch.randn(2, 4, 1, value_width).to(DTYPE)) if beside else ()
    inputs, plan, rows = (
        WindowInputs(query, key, value, mask, *more),
        WindowPlan(70, 0, width**-0.5),
        torch.tensor([3, 1]),
    )
    exact = WindowInputs(*(x if x is None or x.dtype == torch.bool else x.double() for x in inputs)).taken(rows)
    assert relative_error(attend_one(inputs, plan, rows), reference.attend(exact, plan)) < TOLERANCE
    assert launched.keys() == {"window_one"}
