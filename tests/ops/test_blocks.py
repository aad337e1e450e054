"""Blocks of tokens that see one another and all tokens before: by the definition, for every op and backend."""

import pytest
import torch
from torch import Tensor

from ops.window_cases import assert_same_with_gradients, padding, scores, tensors, weighted
from polysketch import ops
from polysketch.ops.native import why_unavailable

COEFFICIENTS = torch.tensor([0.3, 0.5, -0.2], dtype=torch.float64)
SIZES = [1, 3, 8, 16, 300]


def seen(length: int, block_size: int, mask: Tensor | None = None) -> Tensor:
    """(batch, 1, length, length) bool: j's block is not after i's, and j is real."""
    mask = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    position = torch.arange(length) - (mask.cumsum(1) == 0).sum(1, keepdim=True)
    block = position.div(block_size, rounding_mode="floor")
    return ((block[:, :, None] >= block[:, None, :]) & mask[:, None])[:, None]


def softmax(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    logits = (scores(query, key) * query.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    blind = ~allowed.any(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


def polynomial(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    return weighted(scores(query, key) ** 4, allowed, value, 1.0)


def squared(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    found = scores(query, key)
    return weighted((0.3 + 0.5 * found - 0.2 * found**2) ** 2, allowed, value, 1.0)


def window(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, width: int = 11) -> Tensor:
    place = torch.arange(query.shape[2])
    return softmax(query, key, value, allowed & ((place[:, None] - place).abs() < width))


def squared_op(query: Tensor, key: Tensor, value: Tensor, *, cache: bool = False, **options) -> Tensor:
    op = ops.squared_polynomial_attention_with_cache if cache else ops.squared_polynomial_attention
    return op(query, key, value, COEFFICIENTS, **options)


def op_of(definition, backend: str | None, cache: bool = False):
    """The op that has this definition."""
    ending, more = "_with_cache" if cache else "", {} if backend is None else {"backend": backend}
    names = {softmax: "softmax", polynomial: "polynomial", window: "sliding_window"}
    if definition is window:
        more["window"] = 11
    op = squared_op if definition is squared else getattr(ops, f"{names[definition]}_attention{ending}")
    more |= {"cache": cache} if definition is squared else {}
    more |= {} if cache else {"causal": True}
    return lambda *inputs, **options: op(*inputs, **options, **more)


RUNS = [
    (softmax, None),
    *((each, backend) for each in (polynomial, squared) for backend in ("reference", "blockwise")),
    *((window, backend) for backend in ("reference", "blockwise")),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize(("definition", "backend"), RUNS)
def test_an_op_is_its_definition_with_gradients(definition, backend, block_size: int, masked: bool):
    mask = padding(37) if masked else None
    real = torch.ones(2, 37, dtype=torch.bool) if mask is None else mask.cumsum(1) > 0
    allowed, op = seen(37, block_size, mask), op_of(definition, backend)
    assert_same_with_gradients(
        lambda *x: op(*x, block_size=block_size, key_mask=mask).masked_fill(~real[:, None, :, None], 0.0),
        lambda *x: definition(*x, allowed).masked_fill(~real[:, None, :, None], 0.0),
        tensors(37),
    )


@pytest.mark.parametrize("block_size", [8, 100, 300])
@pytest.mark.parametrize(("definition", "backend"), RUNS)
def test_blocks_at_every_place_of_the_rows_that_are_worked_on_together(definition, backend, block_size: int):
    inputs = [x[:1, :2] for x in tensors(700, heads=2)]
    found = op_of(definition, backend)(*inputs, block_size=block_size)
    torch.testing.assert_close(found, definition(*inputs, seen(700, block_size)[:1]), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(why_unavailable() is not None, reason="no compiler")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", SIZES)
def test_the_native_window_is_its_definition_with_gradients(block_size: int, masked: bool):
    mask = padding(137) if masked else None
    inputs = [x.requires_grad_() for x in tensors(137)]
    single = [x.detach().float().requires_grad_() for x in inputs]
    beside = ops.BesideKey(torch.randn(2, 4, 137), torch.randn(2, 4, 137, 5))
    options = {"window": 41, "causal": True, "block_size": block_size, "key_mask": mask}
    found = ops.sliding_window_attention(*single, **options, beside=beside, backend="native")
    doubled = ops.BesideKey(*(x.double() for x in beside))
    expected = ops.sliding_window_attention(*inputs, **options, beside=doubled, backend="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, single, upstream), torch.autograd.grad(expected, inputs, upstream.double())
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [3, 8])
@pytest.mark.parametrize(("definition", "backend"), RUNS)
def test_the_last_queries_over_a_cache_give_what_all_give(definition, backend, block_size: int):
    inputs, start = tensors(37), 24
    query, key, value = inputs
    whole = op_of(definition, backend)(*inputs, block_size=block_size)
    late = op_of(definition, backend, cache=True)(query[:, :, start:], key, value, block_size=block_size)
    torch.testing.assert_close(late, whole[:, :, start:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("definition", [softmax, polynomial, window])
def test_packed_documents_have_blocks_of_their_own(definition):
    inputs, lengths = [x[:1] for x in tensors(37)], [9, 20, 8]
    offsets, op = torch.tensor([0, 9, 29, 37], dtype=torch.int32), op_of(definition, None)
    apart = [op(*x, block_size=8) for x in zip(*(x.split(lengths, 2) for x in inputs), strict=True)]
    found = op(*inputs, block_size=8, cu_seqlens=offsets)
    torch.testing.assert_close(found, torch.cat(apart, 2), rtol=1e-9, atol=1e-10)


def test_packed_linear_attention_has_blocks_of_its_own():
    inputs, lengths = [x[:1] for x in tensors(37)], [9, 20, 8]
    options = {"power": 2, "causal": True, "block_size": 8, "offset": 1.0}
    apart = [ops.linear_attention(*x, **options) for x in zip(*(x.split(lengths, 2) for x in inputs), strict=True)]
    offsets = torch.tensor([0, 9, 29, 37], dtype=torch.int32)
    found = ops.linear_attention(*inputs, **options, cu_seqlens=offsets).output
    torch.testing.assert_close(found, torch.cat([x.output for x in apart], 2), rtol=1e-9, atol=1e-10)


def test_linear_attention_is_its_definition():
    """The reference backend, which is what the others are compared with."""
    query, key, value = tensors(37)
    for mask in (None, padding(37)):
        found = ops.linear_attention(
            query, key, value, power=2, causal=True, block_size=5, offset=1.0, key_mask=mask, backend="reference"
        ).output
        expected = weighted(scores(query, key) ** 2, seen(37, 5, mask), value, 1.0)
        padded = torch.zeros(2, 37, dtype=torch.bool) if mask is None else mask.cumsum(1) == 0
        hidden = padded[:, None, :, None]  # outputs of padding mean nothing
        torch.testing.assert_close(found.masked_fill(hidden, 0.0), expected.masked_fill(hidden, 0.0))


def test_what_does_not_go_together_is_refused():
    inputs = tensors(37)
    with pytest.raises(ValueError, match="causal attention between blocks: it needs causal=True"):
        ops.softmax_attention(*inputs, block_size=4)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        ops.linear_attention(*inputs, causal=True, block_size=0)
    with pytest.raises(ValueError, match="log_decay is over the tokens before"):
        ops.linear_attention(*inputs, causal=True, block_size=4, log_decay=-torch.rand(2, 2, 37))
    local = ops.LocalPolynomial(*inputs[:2], chunk=8)
    with pytest.raises(ValueError, match=r"block_size must divide local.chunk or be a multiple of it, got 12 and 8"):
        ops.linear_attention(*inputs, causal=True, block_size=12, local=local)
    with pytest.raises(ValueError, match="must divide chunk or be a multiple of it, got 12 and 8"):
        ops.local_attention(*inputs, chunk=8, causal=True, block_size=12)
    state = ops.linear_attention(*(x[:, :, :6] for x in inputs), causal=True, return_state=True).state
    with pytest.raises(ValueError, match=r"between two blocks of block_size=4 tokens, got rows after \[6, 6\]"):
        ops.linear_attention(*inputs, causal=True, block_size=4, state=state)


def test_operations_of_blocks_are_those_between_causal_and_both_sides():
    from torch.utils.flop_counter import FlopCounterMode

    def counted(**options) -> int:
        with FlopCounterMode(display=False) as counter:
            ops.polynomial_attention(*tensors(64), backend="blockwise", **options)
        return counter.get_total_flops()

    counts = [counted(causal=True, block_size=size) for size in (1, 8, 24, 64)]
    assert counts[0] == counted(causal=True)
    assert counts[-1] == counted()
    assert counts == sorted(set(counts))
