"""Attention by squares of polynomials: the definition by hand, the blockwise backend against it, what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import pairs_always
from polysketch.ops import (
    polynomial_attention,
    squared_polynomial_attention,
    squared_polynomial_attention_with_cache,
)

BACKENDS = ["reference", "blockwise"]  # that take float64; the native one has tests of its own
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
MIXED = (0.7, -1.1, 0.4, 0.2)


def tensors(length, *, heads=2, key_heads=2, head_dim=8, value_dim=8, batch=2, scale=0.5, coefficients=MIXED):
    """Query and key of products about `scale`^2 times layer-normalised ones, a value, and coefficients, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, length, head_dim), (key_heads, length, head_dim), (key_heads, length, value_dim)]
    query, key, value = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    query, key = (scale * F.layer_norm(x, (head_dim,)) for x in (query, key))
    return [query, key, value, torch.tensor(coefficients, dtype=torch.float64)]


def output_and_gradients(inputs: list[Tensor], **options) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = squared_polynomial_attention(*leaves, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def left_padding(length: int, missing: list[int]) -> Tensor:
    return torch.arange(length) >= torch.tensor(missing)[:, None]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


# The definition, by hand.


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed_values(backend):
    query = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    key = torch.tensor([[[[2.0, 5.0], [-1.0, 2.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    # q . k is [[2, -1], [7, 1]]; (1 + s)^2: [[9, 0], [64, 4]].
    full = squared_polynomial_attention(query, key, value, (1.0, 1.0), backend=backend)
    torch.testing.assert_close(full.flatten(), torch.tensor([9 / 10, (64 + 12) / 69]))
    causal = squared_polynomial_attention(query, key, value, (1.0, 1.0), causal=True, backend=backend)
    torch.testing.assert_close(causal.flatten(), torch.tensor([9 / 10, (64 + 12) / 69]))
    # (3 - s + s^2)^2: [[25, 25], [2025, 9]].
    causal = squared_polynomial_attention(query, key, value, (3, -1, 1), offset=0.0, causal=True, backend=backend)
    torch.testing.assert_close(causal.flatten(), torch.tensor([1.0, (2025 + 27) / 2034]))
    mask = torch.tensor([[False, True]])
    masked = squared_polynomial_attention(query, key, value, (3, -1, 1), offset=1.0, key_mask=mask, backend=backend)
    torch.testing.assert_close(masked.flatten(), torch.tensor([75 / 26, 27 / 10]))


@pytest.mark.parametrize("degree", range(1, 7))
@pytest.mark.parametrize("causal", [False, True])
def test_all_ones_are_the_square_of_the_sum_of_powers(degree, causal):
    inputs = tensors(70, scale=0.4, coefficients=(1.0,) * (degree + 1))
    score = inputs[0] @ inputs[1].mT
    weights = sum(score**power for power in range(degree + 1)) ** 2
    weights = weights.tril() if causal else weights
    expected = weights @ inputs[2] / (1 + weights.sum(-1, keepdim=True))
    for backend in BACKENDS:
        torch.testing.assert_close(squared_polynomial_attention(*inputs, causal=causal, backend=backend), expected)


@pytest.mark.parametrize(("coefficients", "degree"), [((0, 1), 2), ((0, 0, 1), 4), ((0, 0, 0, 0, 1), 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_term_is_polynomial_attention_of_twice_its_degree(coefficients, degree, backend):
    query, key, value, _ = tensors(300)
    found = squared_polynomial_attention(query, key, value, coefficients, causal=True, backend=backend)
    expected = polynomial_attention(query, key, value, degree=degree, causal=True)
    torch.testing.assert_close(found, expected, **TOLERANCE)


# Blockwise is the reference.


SHAPES = (
    ((1.0, 1.0), 2, 2, 8, True),
    (MIXED, 6, 2, 5, False),
    ((0.0, 0.0, 1.0), 4, 1, 11, True),
    ((-3.0, 0.0, 2.0), 3, 3, 8, True),
)


@pytest.mark.parametrize(
    ("length", "causal", "coefficients", "heads", "key_heads", "value_dim", "masked"),
    [
        pytest.param(*one.values[:2], *one.values[2], marks=one.marks)
        for one in pairs_always({"length": (1, 63, 257, 600), "causal": (False, True), "shape": SHAPES})
    ],
)
def test_blockwise_gives_the_references_output_and_gradients(
    length, causal, coefficients, heads, key_heads, value_dim, masked
):
    inputs = tensors(length, heads=heads, key_heads=key_heads, value_dim=value_dim, coefficients=coefficients)
    options = {"offset": 2.0, "causal": causal}
    options["key_mask"] = left_padding(length, [0, length // 3]) if masked else None
    expected = output_and_gradients(inputs, backend="reference", **options)
    for actual, reference in zip(output_and_gradients(inputs, backend="blockwise", **options), expected, strict=True):
        assert reference.abs().max() > 1e-6
        torch.testing.assert_close(actual, reference, rtol=1e-8, atol=1e-9 * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("degree", "length"), [(1, 63), (3, 300), (6, 65)])
def test_blockwise_errs_at_most_twice_as_much_as_the_plain_formula(dtype, degree, length):
    inputs = tensors(length, key_heads=1, head_dim=64, value_dim=64, scale=0.6, coefficients=(1.0,) * (degree + 1))
    inputs = [*(tensor.to(dtype) for tensor in inputs[:3]), inputs[3]]
    options = {"causal": True}
    exact = output_and_gradients([tensor.double() for tensor in inputs], backend="reference", **options)
    plain = output_and_gradients(inputs, backend="reference", **options)
    blockwise = output_and_gradients(inputs, backend="blockwise", **options)
    for truth, simple, ours in zip(exact[:4], plain[:4], blockwise[:4], strict=True):
        assert relative_error(ours, truth) <= max(2 * relative_error(simple, truth), torch.finfo(dtype).eps / 4)
    # The coefficients' gradient is a sum that nearly cancels over all pairs: what is left of rounding is chance.
    assert relative_error(blockwise[4], exact[4]) < 1000 * torch.finfo(dtype).eps


def test_degree_six_of_the_thesis_stays_in_the_range_of_float32_on_heads_of_64():
    coefficients = (-31.0, 22.0, 48.0, -9.0, 44.0, 50.0, -50.0)
    inputs = tensors(200, head_dim=64, value_dim=64, scale=1.0, coefficients=coefficients)
    exact = output_and_gradients(inputs, backend="reference", causal=True)
    single = output_and_gradients([tensor.float() for tensor in inputs], backend="blockwise", causal=True)
    for actual, expected in zip(single, exact, strict=True):
        assert relative_error(actual, expected) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_the_hand_written_gradient_is_the_numerical_one_in_the_coefficients_too(causal):
    inputs = tensors(9, heads=4, key_heads=2, head_dim=3, value_dim=2, batch=1)
    key_mask = left_padding(9, [2])

    def attend(*leaves: Tensor) -> Tensor:
        return squared_polynomial_attention(*leaves, causal=causal, key_mask=key_mask, backend="blockwise")

    assert torch.autograd.gradcheck(attend, [tensor.requires_grad_() for tensor in inputs])


def test_the_operators_denominator_is_differentiable_too():
    query, key, value, terms = (x.requires_grad_() for x in tensors(7, head_dim=3, value_dim=2, batch=1))
    operator = torch.ops.polysketch.squared_polynomial_attention
    assert torch.autograd.gradcheck(
        lambda q, k, v, a: operator(q, k, v, None, a, 1.0, 0, 1), [query, key, value, terms]
    )


def test_every_grouping_of_batch_and_heads_into_tiles_gives_the_same(monkeypatch):
    from polysketch.ops.polynomial import tiling

    inputs = tensors(40, heads=3, key_heads=3, batch=5)
    expected = output_and_gradients(inputs, causal=True, backend="reference")
    for rows, keys, heads_at_once in ((64, 16, 2), (16, 64, 5), (1000, 1000, 1)):
        monkeypatch.setitem(tiling.BLOCK_SIZES, "cpu", tiling.BlockSize(rows, keys, heads_at_once * rows * keys))
        found = output_and_gradients(inputs, causal=True, backend="blockwise")
        for actual, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, reference, **TOLERANCE)


def test_every_element_of_output_and_gradients_is_written():
    inputs = tensors(300, heads=6, key_heads=3)
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for causal in (False, True):
            for tensor in output_and_gradients(inputs, causal=causal, backend="blockwise"):
                assert tensor.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = previous


# Masks, causality, caches. A masked key has the score 0, whose weight is not 0 here.


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_change_nothing_whatever_stands_in_them(backend):
    inputs = tensors(290)
    padded = [F.pad(tensor, (0, 0, 20, 0), value=torch.nan) for tensor in inputs[:3]]
    padded[0] = padded[0].nan_to_num()  # the queries of padding are computed, and their output ignored
    options = {"causal": True, "backend": backend}
    mask = left_padding(310, [20, 20])
    output, *gradients = output_and_gradients([*padded, inputs[3]], key_mask=mask, **options)
    expected = squared_polynomial_attention(*inputs, **options)
    torch.testing.assert_close(output[:, :, 20:], expected, **TOLERANCE)
    assert torch.equal(output[:, :, :20], torch.zeros_like(output[:, :, :20]))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(torch.equal(gradient[:, :, :20], torch.zeros(2, 2, 20, 8).double()) for gradient in gradients[:3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_row_without_a_real_key_gives_zeros_and_no_gradient(backend, offset):
    options = {"key_mask": left_padding(70, [70, 5]), "causal": True, "offset": offset, "backend": backend}
    output, *gradients = output_and_gradients(tensors(70), **options)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert torch.equal(output[1, :, :5], torch.zeros_like(output[1, :, :5]))
    assert all(torch.equal(gradient[0], torch.zeros_like(gradient[0])) for gradient in gradients[:3])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_keeps_a_row_finite_whose_every_weight_is_zero(backend):
    query, key, value, terms = tensors(5)
    inputs = [torch.zeros_like(query), key, value, terms * torch.tensor([0, 1, 1, 1])]
    for tensor in output_and_gradients(inputs, causal=True, backend=backend):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_change_nothing_before_them(backend):
    query, key, value, terms = tensors(520)
    before = squared_polynomial_attention(query, key, value, terms, causal=True, backend=backend)
    for tensor in (query, key, value):
        tensor[:, :, 300:] = 7.0
    after = squared_polynomial_attention(query, key, value, terms, causal=True, backend=backend)
    assert torch.equal(before[:, :, :300], after[:, :, :300])
    assert not torch.allclose(before[:, :, 300:], after[:, :, 300:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [1, 260])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_over_a_cache_give_the_last_rows_of_the_causal_whole(backend, split, masked):
    query, key, value, terms = tensors(300, heads=4, value_dim=5)
    options = {"backend": backend, "key_mask": left_padding(300, [0, 9]) if masked else None}
    whole = squared_polynomial_attention(query, key, value, terms, causal=True, **options)
    last = squared_polynomial_attention_with_cache(query[:, :, -split:], key, value, terms, **options)
    torch.testing.assert_close(last, whole[:, :, -split:], **TOLERANCE)


# As an operator of PyTorch.


def test_the_operators_pass_opcheck():
    query, key, value, terms = (x.float().requires_grad_() for x in tensors(20, heads=4, value_dim=5))
    operator = torch.ops.polysketch.squared_polynomial_attention.default
    torch.library.opcheck(operator, (query, key, value, left_padding(20, [0, 4]), terms, 1.0, 0, 3))
    torch.library.opcheck(operator, (query, key, value, None, terms, 1.0, None, 1))
    inputs = [tensor.detach() for tensor in (query, key, value)]
    output, denominator = (x.detach() for x in operator(*inputs, None, terms, 1.0, 0, 3))
    arguments = (output, denominator, *inputs, None, denominator, terms.detach(), 0, 3, True)
    torch.library.opcheck(torch.ops.polysketch.squared_polynomial_attention_backward.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_compiles_without_a_graph_break_and_with_its_gradient(backend):
    inputs = tensors(70)

    def loss(*leaves: Tensor) -> Tensor:
        return squared_polynomial_attention(*leaves, causal=True, backend=backend).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    for actual, reference in zip(*results, strict=True):
        torch.testing.assert_close(actual, reference, **TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_neither_output_nor_gradients(backend):
    inputs = [tensor.float() for tensor in tensors(300)]
    expected = output_and_gradients(inputs, causal=True, backend=backend)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = squared_polynomial_attention(*leaves, causal=True, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    results = [output, *torch.autograd.grad(output, leaves, upstream)]
    for actual, reference in zip(results, expected, strict=True):
        assert torch.equal(actual, reference)


def test_operations_are_counted_over_the_visible_pairs():
    inputs = [tensor.requires_grad_() for tensor in tensors(10, heads=4, head_dim=8, value_dim=3, batch=1)]
    for causal, pairs in ((False, 4 * 100), (True, 4 * 55)):
        with FlopCounterMode(display=False) as counter:
            squared_polynomial_attention(*inputs, causal=causal, backend="blockwise").sum().backward()
        assert counter.get_total_flops() == 2 * pairs * ((8 + 3) + (3 * 8 + 2 * 3))


def test_memory_is_linear_in_the_length():
    length = 8192
    inputs = [tensor.float().requires_grad_() for tensor in tensors(length, heads=1, key_heads=1, head_dim=4, batch=1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        squared_polynomial_attention(*inputs, causal=True, backend="blockwise").sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    blocks = 4 * 4 * 256 * 256 * 4
    assert peak > blocks / 4  # the probe sees the blocks
    assert peak < blocks + 60 * length * 8 * 4 < 4 * length * length / 8


# Ranges and refusals.


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflowing_row_is_nan_and_never_a_wrong_number(backend):
    query, value = torch.full((1, 1, 2, 1), 2.0**16), torch.full((1, 1, 2, 1), 1e-3)
    found = squared_polynomial_attention(query, query, value, (1, 1, 1, 1), causal=True, backend=backend)
    assert found.isnan().all()


@pytest.mark.parametrize(
    "coefficients", [(), (1.0,), (1.0, math.nan), torch.ones(1), torch.ones(2, 2), torch.ones(2).int()]
)
def test_what_is_no_polynomial_is_refused(coefficients):
    with pytest.raises(ValueError, match="coefficients must be"):
        squared_polynomial_attention(*tensors(4)[:3], coefficients)


def test_bad_arguments_are_refused():
    query, key, value, terms = tensors(12)
    with pytest.raises(TypeError, match="coefficients must be numbers, got True"):
        squared_polynomial_attention(query, key, value, (1.0, True))
    with pytest.raises(ValueError, match="coefficients must be on the device of query, cpu, got meta"):
        squared_polynomial_attention(query, key, value, terms.to("meta"))
    with pytest.raises(ValueError, match="offset must be finite and not negative, got -1"):
        squared_polynomial_attention(query, key, value, terms, offset=-1.0)
    with pytest.raises(ValueError, match="one of auto, reference, blockwise, native, got 'triton'"):
        squared_polynomial_attention(query, key, value, terms, backend="triton")
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 12 keys"):
        squared_polynomial_attention(query[:, :, :5], key, value, terms, causal=True)
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        squared_polynomial_attention_with_cache(query, key[:, :, :5], value[:, :, :5], terms)
