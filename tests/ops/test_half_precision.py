"""Programs on a CPU compute in float32, of bfloat16 and float16 too: they round what they give, and nothing else.

Where the processor has instructions for bfloat16, some of them multiply in it: tests/ops/test_bfloat16.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops import LinearAttentionState
from polysketch.ops.learned_sketch.api import learned_sketch, learned_sketch_backend
from polysketch.ops.linear.types import LocalPolynomial
from polysketch.ops.low_rank_sketch.api import low_rank_sketch, low_rank_sketch_backend
from polysketch.ops.native import why_unavailable
from polysketch.ops.native.bfloat16 import products_in_bfloat16

HALVES = [torch.bfloat16, torch.float16]
LENGTH = 45

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(autouse=True)
def _products_in_float32():
    with products_in_bfloat16(False):
        yield


class Op(NamedTuple):
    """A call: shapes of its tensors, what it makes of them by a backend, and the backend of plain PyTorch."""

    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor]
    plain: str


def rows(heads: int, width: int) -> tuple[int, ...]:
    return 2, heads, LENGTH, width


def linear(**options) -> Op:
    shapes = (rows(4, 6), rows(2, 6), rows(2, 5))

    def call(query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
        return ops.linear_attention(query, key, value, causal=True, offset=1.0, backend=backend, **options).output

    return Op(shapes, call, "chunked")


def beside_chunks(query, key, value, local_query, local_key, backend):
    local = LocalPolynomial(local_query, local_key, 4, 8)
    return ops.linear_attention(
        query, key, value, power=2, causal=True, offset=1.0, local=local, backend=backend
    ).output


def in_a_window(query, key, value, backend):
    return ops.sliding_window_attention(query, key, value, window=9, backend=backend)


def beside_a_key(query, key, value, logit, own, backend):
    beside = ops.BesideKey(logit, own)
    return ops.sliding_window_attention(query, key, value, window=9, beside=beside, backend=backend)


def sketched(x, *weights, backend):
    return learned_sketch(x, list(weights), 2, backend=backend)


_NETWORK = ((8,), (8,), (48, 8), (6, 48), (6,), (6,), (48, 6), (6, 48))

OPS = {
    "linear": linear(),
    "linear, power 2": linear(power=2),
    "linear, two factors": linear(factors=2),
    "linear, not normalized": linear(normalize=False),
    "linear, local": Op((rows(4, 6), rows(2, 6), rows(2, 5), rows(4, 7), rows(2, 7)), beside_chunks, "chunked"),
    "window": Op((rows(4, 6), rows(2, 6), rows(2, 5)), in_a_window, "blockwise"),
    "window, a key beside": Op(
        (rows(4, 6), rows(2, 6), rows(2, 5), (2, 4, LENGTH), rows(4, 5)), beside_a_key, "blockwise"
    ),
    "learned sketch": Op((rows(2, 8), *_NETWORK, *_NETWORK), sketched, "chunked"),
    "LLOPS": Op((rows(2, 8), (2, 1, 2, 8, 12)), low_rank_sketch, "reference"),
}
ALL = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
EACH_HALF = pytest.mark.parametrize("half", HALVES, ids=str)


def tensors(op: Op, half: torch.dtype) -> list[Tensor]:
    """Of numbers that half precision has."""
    generator = torch.Generator().manual_seed(3)
    return [(0.7 * torch.randn(shape, generator=generator)).to(half) for shape in op.shapes]


def gradients(op: Op, given: list[Tensor], backend: str) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    output = op.call(*leaves, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(given[0].dtype)
    return list(torch.autograd.grad(output, leaves, upstream))


@ALL
@EACH_HALF
def test_outputs_are_those_of_the_same_numbers_in_float32_rounded_once(op, half):
    given = tensors(op, half)
    found = op.call(*given, backend="native")
    wide = op.call(*(x.float() for x in given), backend="native")
    assert found.dtype == half
    assert torch.equal(found, wide.to(half))
    with torch.no_grad():
        assert torch.equal(op.call(*given, backend="auto"), found)
    leaves = [x.requires_grad_() for x in given]
    assert torch.equal(op.call(*leaves, backend="native"), found)


@ALL
@EACH_HALF
def test_gradients_are_nearer_to_those_in_float64_than_plain_pytorch_s(op, half):
    given = tensors(op, half)
    exact = gradients(op, [x.double() for x in given], op.plain)
    ours, plain = gradients(op, given, "native"), gradients(op, given, op.plain)
    assert all(x.dtype == half for x in ours)
    rounding = torch.finfo(half).eps

    def error(found: list[Tensor], index: int) -> float:
        return float((found[index].double() - exact[index]).norm() / exact[index].norm())

    for index in range(len(given)):
        assert error(ours, index) <= max(error(plain, index), 0.5 * rounding)


@EACH_HALF
def test_a_query_over_rows_of_a_cache_reads_the_rows_that_it_names(half):
    query, key, value = tensors(OPS["window"], half)
    cache = [torch.cat([torch.full_like(x, torch.nan), x]) for x in (key, value)]
    numbers = torch.tensor([3, 2])
    found = ops.sliding_window_attention_with_cache(query[:, :, -1:], *cache, window=9, key_rows=numbers)
    turned = [x.flip(0) for x in (key, value)]
    assert torch.equal(found, ops.sliding_window_attention_with_cache(query[:, :, -1:], *turned, window=9))


@EACH_HALF
def test_tokens_one_by_one_are_those_of_float32_against_sums_in_float32(half):
    given = tensors(linear(), half)
    sums, wide = LinearAttentionState.init(2, 2, 6, 5), LinearAttentionState.init(2, 2, 6, 5)
    for token in range(6):
        one = [x[:, :, token : token + 1] for x in given]
        found = ops.linear_attention_extend_(*one, sums)
        expected = ops.linear_attention_extend_(*(x.float() for x in one), wide)
        assert found.output.dtype == half
        assert torch.equal(found.output, expected.output.to(half))
        assert torch.equal(found.denominator, expected.denominator)
    assert torch.equal(sums.sums, wide.sums)
    assert sums.sums.dtype == torch.float32


@EACH_HALF
def test_the_programs_are_what_auto_takes_even_of_one_token(half):
    query, key, value = tensors(OPS["window"], half)
    assert ops.linear_attention_backend(query, key, value) == "native"
    assert ops.sliding_window_attention_backend(query, key, value) == "native"
    assert ops.delta_writes_backend(key.float()) == "native"
    assert learned_sketch_backend(key) == "native"
    factors = tensors(OPS["LLOPS"], half)[1]
    assert low_rank_sketch_backend(key[:, :, :1], factors) == "native"


def test_under_autocast_tensors_of_two_dtypes_are_attended_in_float32():
    query, key, value = tensors(OPS["window"], torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.sliding_window_attention(query.float(), key.float(), value, window=9)
    assert torch.equal(found, in_a_window(query.float(), key.float(), value.float(), "native"))
