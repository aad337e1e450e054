"""The sparse memory of the delta rule: its definition token by token, its backends, gradients and states."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from polysketch import ops

BACKENDS = ("reference", "chunked", "native")
BATCH, HEADS, KEY_HEADS, WIDTH, SIZE, KEPT = 2, 4, 2, 5, 6, 3
DIFFERENTIABLE = (1, 3, 4, 5)


def inputs(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Cells that tokens often share, and now and then one cell twice in a vector; keys no longer than one."""
    generator = torch.Generator().manual_seed(seed)

    def sparse(heads: int) -> tuple[Tensor, Tensor]:
        cells = torch.randint(SIZE, (BATCH, heads, length, 2 * KEPT), generator=generator, dtype=torch.int32)
        weights = torch.randn(BATCH, heads, length, 2, KEPT, generator=generator, dtype=torch.float64)
        return cells, torch.nn.functional.normalize(weights + 0.5, dim=-1, p=1).flatten(-2)

    value = torch.randn(BATCH, KEY_HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
    strength = torch.rand(BATCH, KEY_HEADS, length, generator=generator, dtype=torch.float64)
    tensors = (*sparse(HEADS), *sparse(KEY_HEADS), value, strength)
    return [x if x.dtype == torch.int32 else x.to(dtype) for x in tensors]


def dense(cells: Tensor, weights: Tensor) -> Tensor:
    """(..., 2 k) -> (..., size^2), written out cell by cell."""
    a, b = (torch.zeros(*cells.shape[:-1], SIZE, dtype=weights.dtype) for _ in range(2))
    for index in range(KEPT):
        for vector, at in ((a, index), (b, KEPT + index)):
            vector = vector.scatter_add_(-1, cells[..., at, None].long(), weights[..., at, None])
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def one_by_one(tensors: list[Tensor], sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition: every token writes a share of what is missing, and then asks. Answers, and the last memory."""
    query, key, value, strength = dense(*tensors[:2]), dense(*tensors[2:4]), *tensors[4:]
    sums = value.new_zeros(BATCH, KEY_HEADS, SIZE * SIZE, WIDTH) if sums is None else sums
    answers = []
    for token in range(value.shape[2]):
        phi = key[:, :, token, :, None]
        missing = value[:, :, token, None] - phi.mT @ sums
        sums = sums + phi * (strength[:, :, token, None, None] * missing)
        asked = query[:, :, token, None].unflatten(1, (KEY_HEADS, -1))
        answers.append((asked @ sums[:, :, None]).flatten(1, 2))
    return torch.cat(answers, 2), sums


def dtype_of(backend: str) -> torch.dtype:
    return torch.float32 if backend == "native" else torch.float64


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 150])
def test_every_backend_recalls_what_the_definition_does(backend: str, length: int):
    expected, _ = one_by_one(inputs(length))
    found = ops.delta_memory(*inputs(length, dtype_of(backend)), size=SIZE, backend=backend)
    torch.testing.assert_close(found, expected.to(found.dtype), **tolerance(found.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_every_backend_are_those_of_the_definition(backend: str):
    length, found = 70, []
    upstream = torch.randn(BATCH, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for dtype, by_definition in ((torch.float64, True), (dtype_of(backend), False)):
        tensors = inputs(length, dtype)
        tensors[5].data[:, :, 4] = 0.0  # a token of strength zero could still write
        wanted = [tensors[index].requires_grad_() for index in DIFFERENTIABLE]
        output = one_by_one(tensors)[0] if by_definition else ops.delta_memory(*tensors, size=SIZE, backend=backend)
        found.append(torch.autograd.grad(output, wanted, upstream.to(dtype)))
    for expected, gradient in zip(*found, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(gradient, expected.to(gradient.dtype), **tolerance(gradient.dtype))


@pytest.mark.parametrize("backend", ["chunked", "native"])
@pytest.mark.parametrize("split", [[1] * 6 + [64], [40, 30], [33, 1, 36]])
def test_spans_one_after_another_recall_what_the_whole_sequence_does(backend: str, split: list[int]):
    dtype = dtype_of(backend)
    tensors = inputs(sum(split), dtype)
    expected, memory = one_by_one(inputs(sum(split)))
    state = ops.DeltaMemoryState.init(BATCH, KEY_HEADS, SIZE, WIDTH, dtype=dtype)
    parts = [
        ops.delta_memory_extend_(*span, state, backend=backend)
        for span in zip(*(x.split(split, 2) for x in tensors), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 2), expected.to(dtype), **tolerance(dtype))
    torch.testing.assert_close(state.sums, memory.to(dtype), **tolerance(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_key_is_answered_with_its_newest_value(backend: str):
    """With strength one and keys of length one that share no cell, by the same query."""
    dtype = dtype_of(backend)
    cells = torch.tensor([[0, 0], [1, 2], [0, 2], [0, 0], [1, 2]], dtype=torch.int32)[None, None]
    weights, value = torch.ones(1, 1, 5, 2, dtype=dtype), torch.randn(1, 1, 5, 3, dtype=dtype)
    found = ops.delta_memory(
        *(cells[:, :, [0, 1, 2, 2, 0]], weights, cells, weights, value, torch.ones(1, 1, 5, dtype=dtype)),
        size=3,
        backend=backend,
    )
    torch.testing.assert_close(found, value[:, :, [0, 1, 2, 2, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_of_strength_zero_changes_nothing(backend: str):
    tensors = inputs(40, dtype_of(backend))
    tensors[5][:, :, 7] = 0.0
    kept = [index for index in range(40) if index != 7]
    found = ops.delta_memory(*tensors, size=SIZE, backend=backend)
    without = ops.delta_memory(*(x[:, :, kept] for x in tensors), size=SIZE, backend=backend)
    torch.testing.assert_close(found[:, :, kept], without)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    tensors = inputs(100, dtype)
    wide = [x if x.dtype == torch.int32 else x.float() for x in tensors]
    found = ops.delta_memory(*tensors, size=SIZE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, ops.delta_memory(*wide, size=SIZE))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(ops.delta_memory(*tensors, size=SIZE), found)


def test_the_operator_keeps_pytorchs_rules():
    tensors = inputs(40, torch.float32)
    plain = [x.clone() for x in tensors]
    for index in DIFFERENTIABLE:
        tensors[index].requires_grad_()
    torch.library.opcheck(torch.ops.polysketch.delta_memory.default, (*tensors, SIZE))
    recalled, written = torch.ops.polysketch.delta_memory.default(*plain, SIZE)
    backward = torch.ops.polysketch.delta_memory_backward.default
    torch.library.opcheck(backward, (torch.randn_like(recalled), written, *plain, SIZE))


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused():
    tensors = inputs(40, torch.float32)
    with forward_ad.dual_level():
        tensors[4] = forward_ad.make_dual(tensors[4], tensors[4])
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            ops.delta_memory(*tensors, size=SIZE)


def test_an_empty_batch_gives_an_empty_result():
    tensors = [x[:0] for x in inputs(40, torch.float32)]
    assert ops.delta_memory(*tensors, size=SIZE).shape == (0, HEADS, 40, WIDTH)


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (0, torch.full((BATCH, HEADS, 4, 2 * KEPT), SIZE, dtype=torch.int32), "must be cells 0 to 5, got 6 to 6"),
        (2, torch.full((BATCH, KEY_HEADS, 4, 2 * KEPT), -1, dtype=torch.int32), "must be cells 0 to 5, got -1 to -1"),
        (0, torch.zeros(BATCH, HEADS, 4, 2, dtype=torch.int32), "cells and weights must have one shape"),
        (4, torch.ones(BATCH, KEY_HEADS, 3, WIDTH), "must agree"),
        (5, torch.ones(BATCH, KEY_HEADS, 4, 1), "must agree"),
        (4, torch.ones(BATCH, KEY_HEADS, 4), "value must be"),
    ],
)
def test_wrong_tensors_are_refused(index: int, tensor: Tensor, message: str):
    tensors = inputs(4, torch.float32)
    tensors[index] = tensor
    with pytest.raises(ValueError, match=message):
        ops.delta_memory(*tensors, size=SIZE)


def test_odd_widths_heads_that_do_not_divide_and_unknown_backends_are_refused():
    query_cells, query_weights, key_cells, key_weights, value, strength = inputs(4, torch.float32)
    odd = [x[..., :5] for x in (query_cells, query_weights, key_cells, key_weights)]
    with pytest.raises(ValueError, match="an even width, got 5 and 5"):
        ops.delta_memory(*odd, value, strength, size=SIZE)
    three = [x[:, :3] for x in (query_cells, query_weights)]
    with pytest.raises(ValueError, match="multiple of key heads, got 3 and 2"):
        ops.delta_memory(*three, key_cells, key_weights, value, strength, size=SIZE)
    with pytest.raises(ValueError, match="unknown backend 'nothing'; expected 'auto', 'chunked', 'native'"):
        ops.delta_memory(*inputs(4, torch.float32), size=SIZE, backend="nothing")
    with pytest.raises(RuntimeError, match="computes in float32"):
        ops.delta_memory(*inputs(4), size=SIZE, backend="native")


def test_wrong_dtypes_are_refused():
    tensors = inputs(4, torch.float32)
    for index, message in ((0, "query_cells must be int32, got torch.int64"), (5, "strength must be floating point")):
        wrong = list(tensors)
        wrong[index] = wrong[index].long()
        with pytest.raises(TypeError, match=message):
            ops.delta_memory(*wrong, size=SIZE)


def test_a_refused_span_leaves_the_state_as_it_was():
    tensors, state = inputs(4, torch.float32), ops.DeltaMemoryState.init(BATCH, KEY_HEADS, SIZE, WIDTH)
    ops.delta_memory_extend_(*tensors, state)
    before = state.clone()
    for wrong in (ops.DeltaMemoryState(state.sums[..., :-1], SIZE), ops.DeltaMemoryState(state.sums, SIZE + 1)):
        with pytest.raises(ValueError, match="the state does not fit"):
            ops.delta_memory_extend_(*tensors, wrong)
    tensors[2] = tensors[2] + SIZE
    with pytest.raises(ValueError, match="key_cells must be cells"):
        ops.delta_memory_extend_(*tensors, state)
    assert torch.equal(state.sums, before.sums)
