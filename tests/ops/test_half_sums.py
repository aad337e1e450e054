"""Sums in half precision: every call computes as with sums in float32, and rounds them once."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.linear_cases import Case, arguments, empty_state, make, run
from polysketch import ops
from polysketch.ops.linear import native
from polysketch.ops.native import why_unavailable

CASES = {
    "power 1": Case(length=9, power=1, local_chunk=0, decays=True),
    "power 2 in chunks": Case(length=9, local_chunk=4, decays=True),
    "products, one value": Case(length=5, power=1, factors=2, features=10, local_chunk=0, value_dim=1),
    "products, values of several vectors": Case(length=5, power=1, factors=2, features=10, local_chunk=0, value_dim=37),
}
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
dtypes = pytest.mark.parametrize("dtype", EPSILON, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=["program", "plain"])
def by(request, monkeypatch) -> str:
    """The native program of one token, and plain PyTorch."""
    if request.param == "plain":
        monkeypatch.setattr(native, "can_extend", lambda *_: False)
    elif why_unavailable() is not None:
        pytest.skip(str(why_unavailable()))
    return request.param


def started(case: Case, dtype: torch.dtype) -> ops.LinearAttentionState:
    """After some tokens, the sums in `dtype`."""
    first = make(replace(case, dtype=torch.float32, seed=5), 7)
    state = run(replace(case, dtype=torch.float32), first, state=None, return_state=True).state
    return state.with_sums_in(dtype)


def assert_rounded_once(state: ops.LinearAttentionState, wide: ops.LinearAttentionState, by: str) -> None:
    """`wide` has computed in float32 from the same numbers."""
    for name, tensor in state.tensors().items():
        expected = getattr(wide, name).to(tensor.dtype)
        if by == "plain":
            assert torch.equal(tensor, expected), name
        else:  # the compiler joins products and sums in one of the two, and not in the other
            torch.testing.assert_close(tensor, expected, rtol=2 * EPSILON.get(tensor.dtype, 1e-6), atol=1e-6)
    assert state.device_position is state.position


@dtypes
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("name", CASES)
def test_a_call_computes_in_float32_and_rounds_once(name, tokens, dtype, by):
    case = replace(CASES[name], dtype=torch.float32)
    state, tensors = started(case, dtype), make(case)
    address = state.sums.data_ptr()
    steps = 1 if by == "program" and tokens <= 4 else tokens  # programs round after every token
    for start in range(0, case.length // tokens * tokens, steps):
        wide = state.with_sums_in(torch.float32).clone()
        one = tensors.span(start, start + steps)
        found = ops.linear_attention_extend_(one.query, one.key, one.value, state, **arguments(case, one))
        expected = ops.linear_attention_extend_(one.query, one.key, one.value, wide, **arguments(case, one))
        torch.testing.assert_close(found.output, expected.output, rtol=0, atol=4 * EPSILON[dtype])
        assert_rounded_once(state, wide, by)
    assert state.sums.dtype == dtype
    assert state.sums.data_ptr() == address
    assert state.normalizer.dtype == torch.float32


@dtypes
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("factors", [1, 2])
def test_the_delta_rule_computes_in_float32_and_rounds_once(factors, pooled, dtype, by):
    torch.manual_seed(0)
    pool = ops.LinearAttentionState.init(5, 2, 10, 18, factors=factors)
    pool.sums.normal_()
    pool = pool.with_sums_in(dtype)
    rows = torch.tensor([3, 1])
    state = ops.StateRows(pool, rows, torch.zeros(2, dtype=torch.int64)) if pooled else pool.reorder(rows)
    before = pool.sums.clone()
    for _ in range(3):
        wide = state.clone().with_sums_in(torch.float32)
        given = delta_token()
        found = ops.delta_attention_extend_(*given, state, factors=factors)
        expected = ops.delta_attention_extend_(*given, wide, factors=factors)
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * EPSILON[dtype])
        assert_rounded_once(state.clone(), wide, by)
    if pooled:
        assert torch.equal(pool.sums[[0, 2, 4]], before[[0, 2, 4]])


def delta_token() -> list[Tensor]:
    """Query, key, value, strength, of two query heads a key head."""
    query, key = (F.normalize(torch.randn(2, heads, 1, 10), dim=-1) for heads in (4, 2))
    return [query, key, torch.randn(2, 2, 1, 18), torch.rand(2, 2, 1)]


@dtypes
def test_a_program_reads_and_rounds_every_number_as_pytorch_does(dtype):
    """All numbers of 16 bits are read and put back; others are rounded to nearest, or to infinite ones."""
    if why_unavailable() is not None:
        pytest.skip(str(why_unavailable()))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)[: 978 * 67].view(1, 1, 978, 67)
    state = ops.LinearAttentionState.init(1, 1, 978, 67, sums_dtype=dtype)
    state.sums.copy_(every)
    nothing = torch.zeros(1, 1, 1, 978)
    ops.linear_attention_extend_(nothing, nothing, torch.zeros(1, 1, 1, 67), state, normalize=False)
    torch.testing.assert_close(state.sums, every, rtol=0, atol=0, equal_nan=True)
    sizes = 10 ** torch.linspace(-10, 30, 4000)
    edges = torch.tensor([65519.0, 65520.0, 65504.0, 3e38, torch.inf, 2.98e-8, 2.99e-8, 6.1e-5])
    value = torch.cat([sizes, -sizes, edges])
    one, state = torch.ones(1, 1, 1, 1), ops.LinearAttentionState.init(1, 1, 1, len(value), sums_dtype=dtype)
    ops.linear_attention_extend_(one, one, value.view(1, 1, 1, -1), state, normalize=False)
    assert torch.equal(state.sums.flatten(), value.to(dtype))


@dtypes
@pytest.mark.parametrize("backend", ["reference", "chunked", "native"])
def test_a_call_returns_sums_in_the_dtype_that_it_was_given(backend, dtype):
    if backend == "native" and why_unavailable() is not None:
        pytest.skip(str(why_unavailable()))
    case = replace(CASES["power 2 in chunks"], dtype=torch.float32)
    state, tensors = started(case, dtype), make(case)
    found = run(case, tensors, backend=backend, state=state, return_state=True)
    wide = run(case, tensors, backend=backend, state=state.with_sums_in(torch.float32), return_state=True)
    assert torch.equal(found.output, wide.output)
    assert found.state.sums.dtype == dtype
    assert torch.equal(found.state.sums, wide.state.sums.to(dtype))


@dtypes
def test_a_state_of_half_the_size_is_kept_saved_and_reordered_as_it_is(dtype, tmp_path):
    case = replace(CASES["products, values of several vectors"], dtype=torch.float32)
    state = started(case, dtype)
    assert state.sums.nbytes * 2 == empty_state(case).sums.nbytes
    state.save(tmp_path / "state.safetensors")
    loaded = ops.LinearAttentionState.load(tmp_path / "state.safetensors")
    joined = ops.combine(state, replace(state.clone(), sums=torch.zeros_like(state.sums)))
    assert torch.equal(joined.sums, state.sums)
    for other in (loaded, state.clone(), state.reorder(torch.tensor([0, 1]))):
        assert other.rounds_sums
        assert torch.equal(other.sums, state.sums)
        assert torch.equal(other.normalizer, state.normalizer)


def test_sums_of_another_dtype_are_refused():
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="bfloat16 or float16, got torch"):
            ops.LinearAttentionState.init(1, 1, 4, 4, sums_dtype=dtype)
