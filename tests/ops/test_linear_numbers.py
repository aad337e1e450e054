"""What float32 does to linear attention: outputs stay in the range of values, sums do not drift with the length."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops import native
from polysketch.ops.linear.aligned_op import fold
from polysketch.ops.linear.backends import BACKENDS
from polysketch.ops.linear.resolution import resolution
from polysketch.ops.linear.types import Diagonal, Inputs, Plan
from polysketch.ops.native import why_unavailable

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason="no native programs here")
COMPILED = ["chunked", pytest.param("native", marks=needs_compiler)]
UNIT = 2.0**-24


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bound_of_range(features: int) -> float:
    """Of outputs beyond the range, in largest values: two roundings of products whose sizes sum to r squares."""
    return 2 * UNIT * features / resolution(torch.float32)


def assert_in_range(output: Tensor, features: int, low: float = 1.0, high: float = 2.0) -> None:
    beyond = bound_of_range(features) * high
    assert output.min() >= low - beyond
    assert output.max() <= high + beyond


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "block_size": 768}], ids=str)
@pytest.mark.parametrize("local", [False, True])
def test_power_two_stays_in_the_range_of_values_where_queries_are_orthogonal_to_keys(backend, options, local):
    length, features = 2304, 16
    query, key = draw(1, 2, length, features), draw(1, 2, 1, features, seed=1)
    # Half the queries orthogonal to the key, but for rounding.
    along = (query * key).sum(-1, keepdim=True) / key.square().sum(-1, keepdim=True)
    query[:, :, ::2] -= (along * key)[:, :, ::2]
    value = 1 + torch.rand(1, 2, length, 9, generator=torch.Generator().manual_seed(2))
    # Exact weights so small that they hold nothing.
    exact = ops.LocalPolynomial(1e-6 * query, key.expand(-1, -1, length, -1), 2, 256) if local else None
    found = ops.linear_attention(
        query, key.expand(-1, -1, length, -1), value, power=2, local=exact, backend=backend, **options
    )
    assert (found.denominator > 0).all()
    assert_in_range(found.output, features)


@pytest.mark.parametrize("compiled", ["no", pytest.param("yes", marks=needs_compiler)])
def test_decoding_at_power_two_stays_in_the_range_of_values(compiled, monkeypatch):
    if compiled == "no":
        monkeypatch.setattr("polysketch.ops.linear.native.why_no_program", lambda *_: "not here")
    features, length = 20, 300
    key, query = draw(1, 1, 1, features), draw(1, 2, length, features, seed=1)
    query -= (query * key).sum(-1, keepdim=True) / key.square().sum() * key
    value = 1 + torch.rand(1, 1, length, 5, generator=torch.Generator().manual_seed(2))
    state = ops.LinearAttentionState.init(1, 1, features, 5, power=2)
    for token in range(length):
        span = slice(token, token + 1)
        output = ops.linear_attention_extend_(query[:, :, span], key, value[:, :, span], state, power=2).output
        assert_in_range(output, features)


@pytest.mark.parametrize("backend", COMPILED)
def test_what_is_resolved_is_as_the_reference_has_it(backend):
    length, features = 600, 12
    tensors = [draw(1, 1, length, width, seed=width) for width in (features, features, 5)]
    tensors[1] += 3.0  # a mean of keys that outweighs them
    found = ops.linear_attention(*tensors, power=2, causal=True, backend=backend, compute_chunk=64)
    exact = ops.linear_attention(*(x.double() for x in tensors), power=2, causal=True, backend="reference")
    resolved = exact.denominator > 10 * resolution(torch.float32) * features * found.denominator.max()
    assert resolved.float().mean() > 0.5
    error = (found.output - exact.output).abs().amax(-1)
    assert (error[resolved] < 1e-3).all()


def folded(backend: str, key: Tensor, value: Tensor, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sums of all tokens, in the layout of a state."""
    chosen = BACKENDS[backend]
    plan = Plan(1, 1, True, 0.0, False, 2, 64, Diagonal.CAUSAL, True)
    with torch.no_grad():
        return fold(Inputs(key, key, value, log_decay=log_decay), plan, chosen)


@pytest.mark.parametrize("backend", COMPILED)
def test_small_terms_are_not_lost_beside_a_large_sum(backend):
    length, first = 200_000, 2.0**32
    value = torch.ones(1, 1, length, 4)
    value[:, :, 0] = first
    sums, normalizer = folded(backend, torch.ones(1, 1, length, 2), value)
    in_its_chunk = 1024  # what stands beside the first is added to it one by one
    assert (sums.double() - (first + length - 1)).abs().max() <= 2 * UNIT * first + in_its_chunk
    assert (normalizer == length).all()


@pytest.mark.parametrize("backend", COMPILED)
def test_the_error_of_sums_does_not_grow_with_the_length(backend):
    length, tokens = 2**19, 1024  # at most so many are added up before they are folded
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.rand(1, 1, length, 2, generator=generator) + shift for shift in (0.0, 1.0))
    sums, _ = folded(backend, key, value)
    exact = key[0, 0].double().mT @ value[0, 0].double()
    assert ((sums - exact) / exact).abs().max() <= (tokens + 3) * UNIT


@pytest.mark.parametrize("backend", COMPILED)
def test_a_slow_decay_does_not_drift(backend):
    length, rate = 200_000, 1e-7
    key = torch.zeros(1, 1, length, 2)
    key[:, :, 0] = 1.0
    decay = torch.full((1, 1, length), -rate)
    _, normalizer = folded(backend, key, torch.ones(1, 1, length, 2), decay)
    wanted = torch.tensor(-float(decay[0, 0, 0].double().abs()) * (length - 1), dtype=torch.float64).exp()
    assert ((normalizer - wanted) / wanted).abs().max() <= 8 * UNIT


def test_a_state_of_float64_keeps_what_tokens_of_float32_add():
    tokens, state = 3000, ops.LinearAttentionState.init(1, 1, 2, 2, dtype=torch.float64)
    state.sums += 2.0**30
    for _ in range(tokens):
        ops.linear_attention_extend_(*(torch.ones(1, 1, 1, 2) for _ in range(3)), state)
    assert (state.sums == 2.0**30 + tokens).all()


def test_native_programs_resolve_what_pytorch_does():
    source = (Path(native.__file__).parent / "source" / "memory.h").read_text()
    (written,) = re.findall(r"kResolved = (\S+)f;", source)
    assert float.fromhex(written) == resolution(torch.float32)


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mass_whose_inverse_is_infinite_is_none(backend, dtype):
    """Weights of features that hardly overlap: of each row but the last, where one key has weight."""
    if backend == "native" and dtype == torch.float64:
        pytest.skip("the programs take float32")
    small, length = torch.finfo(dtype).tiny / 2**12, 40
    query, key = (torch.full((1, 1, length, 2), 1.0, dtype=dtype) for _ in range(2))
    key = (key * small).index_fill(2, torch.tensor([length - 1]), 1.0)
    value = draw(1, 1, length, 3).to(dtype)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = ops.linear_attention(*leaves, causal=True, backend=backend).output
    assert not output[:, :, :-1].any()
    torch.testing.assert_close(output[:, :, -1], value[:, :, -1])
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.square().sum(), leaves))
    state = ops.LinearAttentionState.init(1, 1, 2, 3, dtype=dtype)
    found = [ops.linear_attention_extend_(*(x[:, :, t : t + 1] for x in leaves), state) for t in range(length)]
    torch.testing.assert_close(torch.cat([one.output for one in found], 2), output)
