"""Exact polynomial attention: the definition by hand, the blockwise backend against it, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import first_always
from polysketch.ops.polynomial import (
    polynomial_attention,
    polynomial_attention_backend,
    polynomial_attention_with_cache,
)
from polysketch.ops.polynomial.blockwise import odd_power, power_
from polysketch.ops.triton import availability

BACKENDS = ["reference", "blockwise"]  # that take float64; the native one has tests of its own
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def tensors(length, *, key_length=None, heads=2, key_heads=2, head_dim=8, value_dim=8, batch=2, seed=0):
    """Layer-normalised query and key, and a value, in float64."""
    generator = torch.Generator().manual_seed(seed)
    key_length = key_length or length
    shapes = [(heads, length, head_dim), (key_heads, key_length, head_dim), (key_heads, key_length, value_dim)]
    query, key, value = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [F.layer_norm(query, (head_dim,)), F.layer_norm(key, (head_dim,)), value]


def output_and_gradients(inputs: list[Tensor], **options) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = polynomial_attention(*leaves, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def left_padding(length: int, missing: list[int]) -> Tensor:
    return torch.arange(length) >= torch.tensor(missing)[:, None]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


# The definition, by hand.


@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
def test_hand_computed_values(backend):
    query = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    key = torch.tensor([[[[2.0, 5.0], [-1.0, 2.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    # q . k is [[2, -1], [7, 1]]; degree 2: [[4, 1], [49, 1]].
    full = polynomial_attention(query, key, value, degree=2, backend=backend)
    torch.testing.assert_close(full.flatten(), torch.tensor([(4 + 3) / 6, (49 + 3) / 51]))
    causal = polynomial_attention(query, key, value, degree=2, causal=True, backend=backend)
    torch.testing.assert_close(causal.flatten(), torch.tensor([4 / 5, (49 + 3) / 51]))
    fourth = polynomial_attention(query, key, value, degree=4, offset=3.0, backend=backend)
    torch.testing.assert_close(fourth.flatten(), torch.tensor([(16 + 3) / 20, (2401 + 3) / 2405]))
    halved = polynomial_attention(query, key, value, degree=2, scale=0.5, offset=0.0, backend=backend)
    torch.testing.assert_close(halved.flatten(), torch.tensor([(1 + 0.75) / 1.25, (12.25 + 0.75) / 12.5]))
    masked = polynomial_attention(query, key, value, degree=2, key_mask=torch.tensor([[False, True]]), backend=backend)
    torch.testing.assert_close(masked.flatten(), torch.tensor([3 / 2, 3 / 2]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_goes_with_the_offset_times_its_power(backend):
    inputs = [tensor * 0.3 for tensor in tensors(40)]
    plain = polynomial_attention(*inputs, degree=4, offset=1.0, causal=True, backend=backend)
    scaled = polynomial_attention(*inputs, degree=4, scale=0.25, offset=0.25**4, causal=True, backend=backend)
    torch.testing.assert_close(plain, scaled, **TOLERANCE)


@pytest.mark.parametrize("exponent", range(1, 18))
def test_powers_are_powers(exponent):
    base = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(power_(base.clone(), exponent), base**exponent)
    if exponent % 2 == 1:
        torch.testing.assert_close(odd_power(base, exponent, out=torch.empty_like(base)), base**exponent)


# Blockwise is the reference.


@pytest.mark.parametrize("length", [1, 63, 65, 257, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("degree", "heads", "key_heads", "value_dim", "masked"),
    [(2, 2, 2, 8, True), (4, 6, 2, 5, False), (4, 4, 1, 11, True), (6, 2, 2, 3, False), (8, 3, 3, 8, True)],
)
def test_blockwise_gives_the_references_output_and_gradients(
    length, causal, degree, heads, key_heads, value_dim, masked
):
    inputs = tensors(length, heads=heads, key_heads=key_heads, value_dim=value_dim)
    options = {"degree": degree, "scale": 0.6, "offset": 2.0, "causal": causal}
    options["key_mask"] = left_padding(length, [0, length // 3]) if masked else None
    expected = output_and_gradients(inputs, backend="reference", **options)
    for actual, reference in zip(output_and_gradients(inputs, backend="blockwise", **options), expected, strict=True):
        assert reference.abs().max() > 1e-6
        torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-10 * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("degree", "length"), [(4, 1), (4, 63), (4, 65), (4, 520), (8, 300)])
def test_blockwise_errs_at_most_twice_as_much_as_the_plain_formula(dtype, degree, length):
    inputs = [tensor.to(dtype) for tensor in tensors(length, heads=2, key_heads=1, head_dim=64, value_dim=64)]
    # A lone weight of 64^degree holds all of the mass and leaves no gradient but rounding: make that weight 1.
    options = {"degree": degree, "causal": True, "scale": 1 / 64 if length == 1 else 1.0}
    exact = output_and_gradients([tensor.double() for tensor in inputs], backend="reference", **options)
    plain = output_and_gradients(inputs, backend="reference", **options)
    blockwise = output_and_gradients(inputs, backend="blockwise", **options)
    for name, truth, simple, ours in zip(("output", "query", "key", "value"), exact, plain, blockwise, strict=True):
        assert ours.dtype == dtype
        floor = torch.finfo(dtype).eps / 4
        assert relative_error(ours, truth) <= max(2 * relative_error(simple, truth), floor), name


@pytest.mark.parametrize("degree", [8, 16])
def test_high_degrees_on_heads_of_64_stay_in_the_range_of_float32(degree):
    inputs = tensors(200, head_dim=64, value_dim=64)
    options = {"degree": degree, "causal": True}
    exact = output_and_gradients(inputs, backend="reference", **options)
    single = output_and_gradients([tensor.float() for tensor in inputs], backend="blockwise", **options)
    for actual, expected in zip(single, exact, strict=True):
        assert relative_error(actual, expected) < 1e-4


@pytest.mark.parametrize("batch", [1, 3])
def test_strides_do_not_matter(batch):
    inputs = tensors(300, heads=4, batch=batch)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    strided[2] = inputs[2].transpose(2, 3).contiguous().transpose(2, 3)
    options = {"causal": True, "backend": "blockwise"}
    expected = output_and_gradients(inputs, **options)
    for actual, reference in zip(output_and_gradients(strided, **options), expected, strict=True):
        torch.testing.assert_close(actual, reference, **TOLERANCE)


@pytest.mark.parametrize("shape", [(5, 3, 40), (1, 7, 200), (3, 12, 8), (9, 1, 130)])
def test_every_grouping_of_batch_and_heads_into_tiles_gives_the_same(shape, monkeypatch):
    from polysketch.ops.polynomial import tiling

    batch, heads, length = shape
    inputs = tensors(length, heads=heads, key_heads=heads, batch=batch)
    expected = output_and_gradients(inputs, causal=True, backend="reference")
    for rows, keys, heads_at_once in ((64, 16, 2), (16, 64, 5), (256, 256, 4), (1000, 1000, 1)):
        size = tiling.BlockSize(rows, keys, heads_at_once * rows * keys)
        monkeypatch.setitem(tiling.BLOCK_SIZES, "cpu", size)
        for actual, reference in zip(
            output_and_gradients(inputs, causal=True, backend="blockwise"), expected, strict=True
        ):
            torch.testing.assert_close(actual, reference, **TOLERANCE)


def test_every_element_of_output_and_gradients_is_written():
    inputs = tensors(300, heads=6, key_heads=3)
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()  # uninitialised memory is poisoned with NaN
        for causal in (False, True):
            for tensor in output_and_gradients(inputs, causal=causal, backend="blockwise"):
                assert tensor.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = previous


# Masks, causality, caches.


@pytest.mark.parametrize("backend", BACKENDS)
def test_left_padding_changes_nothing_whatever_stands_in_it(backend):
    inputs = tensors(290)
    padded = [F.pad(tensor, (0, 0, 20, 0), value=torch.nan) for tensor in inputs]
    padded[0] = padded[0].nan_to_num()  # the queries of padding are computed, and their output ignored
    output = polynomial_attention(*padded, causal=True, key_mask=left_padding(310, [20, 20]), backend=backend)
    expected = polynomial_attention(*inputs, causal=True, backend=backend)
    torch.testing.assert_close(output[:, :, 20:], expected, **TOLERANCE)
    assert torch.equal(output[:, :, :20], torch.zeros_like(output[:, :, :20]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_row_without_a_real_key_gives_zeros_and_no_gradient(backend, offset):
    options = {"key_mask": left_padding(70, [70, 5]), "causal": True, "offset": offset, "backend": backend}
    output, *gradients = output_and_gradients(tensors(70), **options)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert torch.equal(output[1, :, :5], torch.zeros_like(output[1, :, :5]))
    assert output[1].isfinite().all()
    for gradient in gradients:
        assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_change_nothing_before_them(backend):
    query, key, value = tensors(520)
    before = polynomial_attention(query, key, value, causal=True, backend=backend)
    for tensor in (query, key, value):
        tensor[:, :, 300:] = 7.0
    after = polynomial_attention(query, key, value, causal=True, backend=backend)
    assert torch.equal(before[:, :, :300], after[:, :, :300])
    assert not torch.allclose(before[:, :, 300:], after[:, :, 300:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [1, 7, 260, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_over_a_cache_give_the_last_rows_of_the_causal_whole(backend, split, masked):
    query, key, value = tensors(300, heads=4, value_dim=5)
    options = {"degree": 4, "scale": 0.7, "offset": 0.5, "backend": backend}
    options["key_mask"] = left_padding(300, [0, 9]) if masked else None
    whole = polynomial_attention(query, key, value, causal=True, **options)
    last = polynomial_attention_with_cache(query[:, :, -split:], key, value, **options)
    torch.testing.assert_close(last, whole[:, :, -split:], **TOLERANCE)


def test_gradients_flow_through_a_cache():
    query, key, value = (tensor.requires_grad_() for tensor in tensors(300))
    results = []
    for backend in BACKENDS:
        output = polynomial_attention_with_cache(query[:, :, -40:], key, value, backend=backend)
        results.append(torch.autograd.grad(output.square().sum(), (query, key, value)))
    for actual, reference in zip(*results, strict=True):
        torch.testing.assert_close(actual, reference, **TOLERANCE)


# As an operator of PyTorch.


@pytest.mark.parametrize(
    ("degree", "causal"),
    first_always([(4, True), (6, False), (2, True), (2, False), (4, False), (6, True)], 3, several=True),
)
def test_the_hand_written_gradient_is_the_numerical_one(causal, degree):
    inputs = [tensor.requires_grad_() for tensor in tensors(9, heads=4, key_heads=2, head_dim=3, value_dim=2, batch=1)]
    key_mask = left_padding(9, [2])

    def attend(*tensors: Tensor) -> Tensor:
        options = {"degree": degree, "scale": 0.8, "causal": causal, "key_mask": key_mask, "backend": "blockwise"}
        return polynomial_attention(*tensors, **options)

    assert torch.autograd.gradcheck(attend, inputs)


def test_the_operators_denominator_is_differentiable_too():
    inputs = [tensor.requires_grad_() for tensor in tensors(7, head_dim=3, value_dim=2, batch=1)]
    operator = torch.ops.polysketch.polynomial_attention
    assert torch.autograd.gradcheck(lambda *tensors: operator(*tensors, None, 4, 0.9, 1.0, 0, 1), inputs)


@pytest.mark.parametrize("dtype", first_always([torch.float32, torch.bfloat16]))
def test_the_operators_pass_opcheck(dtype):
    query, key, value = (t.to(dtype).requires_grad_() for t in tensors(20, heads=4, value_dim=5))
    strided = query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    operator = torch.ops.polysketch.polynomial_attention.default
    torch.library.opcheck(operator, (strided, key, value, left_padding(20, [0, 4]), 4, 1.0, 1.0, 0, 3))
    torch.library.opcheck(operator, (query, key, value, None, 2, 0.5, 1.0, None, 1))
    output, denominator = (tensor.detach() for tensor in operator(query, key, value, None, 4, 1.0, 1.0, 0, 3))
    inputs = [tensor.detach() for tensor in (query, key, value)]
    arguments = (output, denominator, *inputs, None, denominator, 4, 1.0, 0, 3)
    torch.library.opcheck(torch.ops.polysketch.polynomial_attention_backward.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_compiles_without_a_graph_break_and_with_its_gradient(backend):
    inputs = tensors(70)
    options = {"causal": True, "key_mask": left_padding(70, [0, 4]), "backend": backend}

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return polynomial_attention(query, key, value, **options).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    for actual, reference in zip(*results, strict=True):
        torch.testing.assert_close(actual, reference, **TOLERANCE)


@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
def test_autocast_changes_neither_output_nor_gradients(backend):
    inputs = [tensor.float() for tensor in tensors(300)]
    expected = output_and_gradients(inputs, causal=True, backend=backend)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = polynomial_attention(*leaves, causal=True, backend=backend)
        mixed = polynomial_attention(inputs[0], inputs[1], inputs[2].bfloat16(), causal=True, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    results = [output, *torch.autograd.grad(output, leaves, upstream)]
    for actual, reference in zip(results, expected, strict=True):
        assert torch.equal(actual, reference)
    assert mixed.dtype == torch.bfloat16
    assert relative_error(mixed, expected[0].double()) < 0.01


def test_the_blockwise_backward_is_the_same_when_it_runs_under_autocast_itself():
    inputs = [tensor.float() for tensor in tensors(300)]
    expected = output_and_gradients(inputs, causal=True, backend="blockwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = output_and_gradients(inputs, causal=True, backend="blockwise")
    for actual, reference in zip(results, expected, strict=True):
        assert torch.equal(actual, reference)


def test_operations_are_counted_over_the_visible_pairs():
    inputs = [tensor.requires_grad_() for tensor in tensors(10, heads=4, head_dim=8, value_dim=3, batch=1)]
    for causal, pairs in ((False, 4 * 100), (True, 4 * 55)):
        with FlopCounterMode(display=False) as counter:
            polynomial_attention(*inputs, causal=causal, backend="blockwise").sum().backward()
        assert counter.get_total_flops() == 2 * pairs * ((8 + 3) + (3 * 8 + 2 * 3))


def test_memory_is_linear_in_the_length():
    length, head_dim = 8192, 4
    inputs = [t.float().requires_grad_() for t in tensors(length, heads=1, key_heads=1, head_dim=head_dim, batch=1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        polynomial_attention(*inputs, causal=True, backend="blockwise").sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    in_use = peak = 0
    for size in sizes:
        in_use += size
        peak = max(peak, in_use)
    blocks = 2 * 4 * 256 * 256 * 4
    assert peak > blocks / 4  # the probe sees the blocks
    assert peak < blocks + 40 * length * 8 * 4 < 4 * length * length / 10


# Ranges and refusals.


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflowing_row_is_nan_and_never_a_wrong_number(backend):
    value = torch.full((1, 1, 2, 1), 1e-3)

    def attend(entry: float) -> Tensor:
        query = torch.full((1, 1, 2, 1), entry)
        return polynomial_attention(query, query, value, degree=8, causal=True, backend=backend).flatten()

    each_weight, only_the_sum = attend(2.0**16), attend(2e38 ** (1 / 16))
    assert each_weight.isnan().all()
    torch.testing.assert_close(only_the_sum[0], torch.tensor(1e-3))
    assert only_the_sum[1].isnan()


def test_auto_is_the_reference_on_short_sequences_and_blockwise_beyond():
    short, _, _ = tensors(16)
    long, _, _ = tensors(300)
    assert polynomial_attention_backend(short, short) == "reference"
    assert polynomial_attention_backend(long, long) == "blockwise"
    assert (
        polynomial_attention_backend(short.expand(2, 2, 16, 8).repeat(200, 1, 1, 1), short.repeat(200, 1, 1, 1))
        == "blockwise"
    )
    assert polynomial_attention_backend(short, short, backend="blockwise") == "blockwise"
    with pytest.raises(ValueError, match="one of auto, reference, blockwise, native, triton, got 'flash'"):
        polynomial_attention(short, short, short, backend="flash")
    with pytest.raises(RuntimeError, match=r"the triton backend computes float32, .* got torch.float64"):
        polynomial_attention(short, short, short, backend="triton")


def test_auto_is_triton_on_cuda_where_its_programs_take_the_tensors(monkeypatch):
    monkeypatch.setattr(availability, "_why_not_on", lambda index: None)
    monkeypatch.setattr(availability, "_INSTALLED", True)
    with FakeTensorMode():
        x = torch.empty(1, 2, 3, 64, device="cuda", dtype=torch.bfloat16)
        wide = x.expand(4, 1, 2, 3, 64).permute(1, 2, 3, 4, 0).flatten(3)
        assert polynomial_attention_backend(x, x) == polynomial_attention_backend(x, x, x) == "triton"
        assert polynomial_attention_backend(x.double(), x.double()) == "reference"
        assert polynomial_attention_backend(x, x, wide) == "reference"
        with pytest.raises(RuntimeError, match="vectors of up to 128, got one of 256"):
            polynomial_attention_backend(x, x, wide, backend="triton")
        monkeypatch.setattr(availability, "_why_not_on", lambda index: "too old")
        assert polynomial_attention_backend(x, x) == "reference"


@pytest.mark.parametrize("degree", [3, 0, -2, 1, 2.0, True])
def test_a_degree_that_is_not_even_and_positive_is_refused(degree):
    with pytest.raises(ValueError, match="degree must be an even integer"):
        polynomial_attention(*tensors(4), degree=degree)


def test_a_degree_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match=r"degree must be below 2\*\*63"):
        polynomial_attention(*tensors(4), degree=2**70)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_scale_and_offset_must_be_finite(number):
    with pytest.raises(ValueError, match="scale must be finite"):
        polynomial_attention(*tensors(4), scale=number)
    with pytest.raises(ValueError, match="offset must be finite and not negative"):
        polynomial_attention(*tensors(4), offset=number)
    with pytest.raises(ValueError, match="offset must be finite and not negative, got -1"):
        polynomial_attention(*tensors(4), offset=-1.0)


def test_tensors_that_do_not_belong_together_are_refused():
    query, key, value = tensors(12)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 12 keys"):
        polynomial_attention(query[:, :, :5], key, value, causal=True)
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        polynomial_attention_with_cache(query, key[:, :, :5], value[:, :, :5])
    with pytest.raises(TypeError, match="must share one dtype outside autocast"):
        polynomial_attention(query, key, value.bfloat16())
    with pytest.raises(ValueError, match="must be on one device"):
        polynomial_attention(query, key, value.to("meta"))
    with pytest.raises(ValueError, match="multiple of the key heads, got 1 and 2"):
        polynomial_attention(query[:, :1], key, value)
    with pytest.raises(ValueError, match="must share head_dim"):
        polynomial_attention(query[..., :7], key, value)
    with pytest.raises(TypeError, match="key_mask must be bool"):
        polynomial_attention(query, key, value, key_mask=torch.ones(2, 12))
    with pytest.raises(ValueError, match="key_mask must be"):
        polynomial_attention(query, key, value, key_mask=torch.ones(2, 11, dtype=torch.bool))
