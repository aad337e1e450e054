"""Decoding on rows of a pool, as a server keeps states: by a device's fastest programs, against float64 on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from device.yardstick import DTYPES
from polysketch import ops

ROWS, POOL, STEPS = [6, 1, 3], 8, 5
SUMS = [*((dtype, None) for dtype in DTYPES), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)]
"""Of tokens, and of sums in half precision."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pool_of(width: int, features: int, **options: Any) -> ops.LinearAttentionState:
    """A pool whose sums are something, in float32 unless asked otherwise."""
    state = ops.LinearAttentionState.init(POOL, 2, features, width, **options)
    state.sums.copy_(drawn(*state.sums.shape, seed=1))
    state.normalizer.copy_(drawn(*state.normalizer.shape, seed=2).abs() + 5.0)
    return state


def some_rows(pool: ops.LinearAttentionState, where: torch.device) -> ops.StateRows:
    """Three rows of a pool that lies on the device."""
    tensors = {name: x if name == "position" else x.to(where) for name, x in pool.tensors().items()}
    there = ops.LinearAttentionState(**tensors, power=pool.power, factors=pool.factors)
    return ops.StateRows(there, torch.tensor(ROWS, device=where), torch.zeros(3, dtype=torch.int64))


def exactly(pool: ops.LinearAttentionState) -> ops.LinearAttentionState:
    """The same rows, alone, in float64 on the CPU."""
    own = pool.reorder(torch.tensor(ROWS))
    tensors = {name: x if name == "position" else x.double() for name, x in own.tensors().items()}
    return ops.LinearAttentionState(**tensors, power=pool.power, factors=pool.factors)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within what the dtype allows of the largest number."""
    error = (found.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize(("dtype", "half"), SUMS, ids=str)
@pytest.mark.parametrize("queries", [1, 2])
def test_the_delta_rule_moves_rows_on(dtype, half, queries, device):
    pool = pool_of(17, 16, factors=2, sums_dtype=half)
    state, exact = some_rows(pool, device.where), exactly(pool)
    for step in range(STEPS):
        query, key = (F.normalize(drawn(3, heads, 1, 16, seed=step), dim=-1) for heads in (2 * queries, 2))
        given = [x.to(dtype) for x in (query, key, drawn(3, 2, 1, 17, seed=step), drawn(3, 2, 1).sigmoid())]
        found = ops.delta_attention_extend_(*(x.to(device.where) for x in given), state, factors=2)
        expected = ops.delta_attention_extend_(*(x.double() for x in given), exact, factors=2)
        assert_close(found, expected, half or dtype)
    assert_close(state.pool.sums[state.rows], exact.sums, half or dtype)


@pytest.mark.parametrize(("dtype", "half"), SUMS, ids=str)
@pytest.mark.parametrize("options", [{"power": 2, "local_chunk": 3, "local_dim": 16}, {"power": 1}], ids=str)
def test_linear_attention_moves_rows_on(dtype, half, options, device):
    pool = pool_of(16, 16, sums_dtype=half, **options)
    state, exact = some_rows(pool, device.where), exactly(pool)
    for step in range(STEPS):
        query, key, value = (drawn(3, 2, 1, 16, seed=9 * step + i).abs().div(4).to(dtype) for i in range(3))

        def move_on(state: object, *given: Tensor) -> Tensor:
            local = ops.LocalPolynomial(*given[:2], 2, 3) if "local_chunk" in options else None
            own = {"power": options["power"], "local": local}
            return ops.linear_attention_extend_(*given, state, **own).output

        found = move_on(state, *(x.to(device.where) for x in (query, key, value)))
        assert_close(found, move_on(exact, *(x.double() for x in (query, key, value))), half or dtype)
    assert_close(state.pool.sums[state.rows], exact.sums, half or dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 4])
def test_a_window_is_read_where_it_lies(dtype, heads, device):
    query, key, value = drawn(3, heads, 1, 24).to(dtype), drawn(POOL, 2, 90, 24).to(dtype), drawn(POOL, 2, 90, 16)
    beside, mask = (drawn(3, heads, 1).to(dtype), drawn(3, heads, 1, 16).to(dtype)), drawn(POOL, 90) > -1.0
    rows, value = torch.tensor(ROWS), value.to(dtype)
    there = [x.to(device.where) for x in (query, key, value, mask, rows, *beside)]
    found = ops.sliding_window_attention_with_cache(
        *there[:3], window=70, key_mask=there[3], key_rows=there[4], beside=ops.BesideKey(*there[5:])
    )
    exact = (query.double(), key[rows].double(), value[rows].double())
    more = {"key_mask": mask[rows], "beside": ops.BesideKey(*(x.double() for x in beside))}
    expected = ops.sliding_window_attention_with_cache(*exact, window=70, backend="reference", **more)
    assert_close(found, expected, dtype)
