"""The programs of causal convolutions under Triton's interpreter, against the definition in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math

import pytest
import torch
import triton as compiler
import triton.language as tl

from attention.covering import first_always
from polysketch import ops
from polysketch.nn import ProjectionConvolution
from polysketch.ops.convolution import api, causal_convolution, causal_convolution_backend
from polysketch.ops.convolution.triton.programs import backward, forward
from polysketch.ops.convolution.triton.programs.backward import add_up as add_all
from polysketch.ops.convolution.triton.programs.forward import load_seen as load_intact
from polysketch.ops.convolution.triton.programs.forward import load_tap as load_its_tap
from polysketch.ops.triton import forced

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SMALL = {"TOKENS": 16, "BLOCK": 16, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("causal_convolution", "causal_convolution_backward")
HEADS, LENGTH, WIDTH, SIZE = 2, 21, 20, 4


@pytest.fixture
def small_blocks():
    """Several tiles of tokens and of channels at sizes that the interpreter can do."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield


@pytest.fixture
def programs_on_a_cpu(nothing_asked, monkeypatch):
    """A CPU that "auto" of this op alone takes for a device of the programs, which has asked nothing yet."""
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


def case(shape=(1, HEADS, LENGTH, WIDTH), size=SIZE, *, lead=None, tail=False, masked=False):
    """x, filters, mask and tail; the filters of every head and channel their own unless `lead` is given."""
    generator = torch.Generator().manual_seed(size)
    normal = lambda *sizes: torch.randn(sizes, generator=generator)  # noqa: E731
    x, weight = normal(*shape), normal(*(lead or (shape[1], shape[3])), size)
    before = normal(*shape[:2], size - 1, shape[3]) if tail else None
    return x, weight, torch.rand(shape[0], shape[2], generator=generator) > 0.3 if masked else None, before


def outputs_and_gradients(x, weight, key_mask, tail, backend="triton", given=("output", "tail")):
    """Output, tail after it, and gradients of x, weight and tail from those of what is `given`, by name."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in (x, weight, tail)]
    options = {"key_mask": key_mask, "tail": leaves[2], "backend": backend}
    outputs = dict(zip(("output", "tail"), causal_convolution(*leaves[:2], **options), strict=True))
    generator = torch.Generator().manual_seed(7)
    cotangents = {  # which every dtype holds exactly
        name: torch.randn(output.shape, generator=generator).half().to(output) for name, output in outputs.items()
    }
    gradients = torch.autograd.grad(
        [outputs[name] for name in given],
        [leaf for leaf in leaves if leaf is not None],
        [cotangents[name] for name in given],
    )
    return [*(output.detach() for output in outputs.values()), *gradients]


def relative_errors(given, dtype=torch.float32):
    """Of both outputs and all gradients, the programs' in `dtype` against the definition in float64."""
    x, weight, key_mask, tail = given
    rounded = [None if one is None else one.to(dtype) for one in (x, weight, tail)]
    found = outputs_and_gradients(*rounded[:2], key_mask, rounded[2])
    exact = [None if one is None else one.double() for one in rounded]
    expected = outputs_and_gradients(*exact[:2], key_mask, exact[2], "reference")
    assert {one.dtype for one in found} == {dtype}
    assert [one.shape for one in found] == [one.shape for one in expected]
    # max() would pass over what is not a number; the norm of nothing is zero
    return [error(a, b) for a, b in zip(found, expected, strict=True)]


def error(found, exact):
    return ((found - exact).norm() / exact.norm().clamp(min=1e-9)).nan_to_num(math.inf).item()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("tail", "masked"), [(False, False), (True, True), (True, False), (False, True)])
def test_outputs_and_gradients_agree_with_the_definition_in_float64(tail, masked):
    assert max(relative_errors(case((2, 2, 17, 9), tail=tail, masked=masked))) < 5e-7


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lead", first_always([(1, WIDTH), (1, 1), (HEADS, 1)], 2))
def test_heads_and_channels_may_share_filters(lead):
    assert max(relative_errors(case(lead=lead, tail=True))) < 5e-7


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("length", "width", "size"),
    first_always(
        [(40, 33, 3), (12, 7, 7), (16, 16, 1), (33, 5, 10), (1, 16, 4), (2, 1, 40), (17, 48, 2)], 4, several=True
    ),
)
@pytest.mark.parametrize("continued", first_always([True, False]))
def test_of_any_number_of_tokens_channels_and_taps(length, width, size, continued):
    given = case((1, 1, length, width), size, tail=continued, masked=continued and length > 1)
    assert max(relative_errors(given)) < 1e-6


@pytest.mark.parametrize("size", [SIZE, pytest.param(9, marks=pytest.mark.full)])
def test_the_shipped_configurations_agree_with_the_definition(size):
    assert max(relative_errors(case((1, 1, 70, 67), size))) < 5e-7


@pytest.mark.usefixtures("small_blocks")
def test_half_precision_is_rounded_once():
    x, weight, mask, tail = case(tail=True, masked=True)
    given = x.half(), weight.half().float(), mask, tail.half()
    found = outputs_and_gradients(*given, given=("output",))
    exact = [None if one is None else one.double() if one.is_floating_point() else one for one in given]
    expected = outputs_and_gradients(*exact, "reference", given=("output",))
    # As under autocast: the filters have their own dtype, and so has their gradient.
    assert [one.dtype for one in found] == [torch.float16] * 3 + [torch.float32, torch.float16]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-11 * 1.01, atol=2e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lengths", [(3, 17), (1, 2, 17)])
def test_a_sequence_in_pieces_gives_what_it_gives_whole(lengths):
    """Gradients too, which go from piece to piece by the tails."""
    x, weight, mask, _ = case((1, 1, 20, 9), masked=True)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    whole, tail_of_whole = causal_convolution(*leaves, key_mask=mask, backend="triton")
    outputs, tail = [], None
    for piece, of_piece in zip(x.split(lengths, 2), mask.split(lengths, 1), strict=True):
        output, tail = causal_convolution(piece, weight, key_mask=of_piece, tail=tail, backend="triton")
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, 2), whole)
    assert torch.equal(tail, tail_of_whole)
    cotangents = torch.randn_like(whole), torch.randn_like(tail)
    expected = torch.autograd.grad([whole, tail_of_whole], leaves, cotangents)
    torch.testing.assert_close(torch.autograd.grad([torch.cat(outputs, 2), tail], leaves, cotangents), expected)


@pytest.mark.usefixtures("small_blocks")
def test_a_tail_has_memory_of_its_own_and_the_wider_dtype():
    x, weight, mask, tail = case((1, 1, 5, 6), tail=True)
    for before, dtype in ((None, torch.float16), (tail, torch.float32), (tail.half(), torch.float16)):
        for tokens in (x.half(), x.half()[:, :, :2]):
            after = causal_convolution(tokens, weight, key_mask=mask, tail=before, backend="triton")[1]
            assert after.dtype == dtype
            assert after.untyped_storage().nbytes() == after.numel() * after.element_size()
    found = outputs_and_gradients(x.half(), weight, None, tail)
    assert [one.dtype for one in found[2:]] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.usefixtures("small_blocks")
def test_what_stands_at_masked_tokens_reaches_nothing_and_no_gradient_reaches_it():
    x, weight, mask, tail = case((2, 1, 17, 6), tail=True, masked=True)
    expected = outputs_and_gradients(x, weight, mask, tail)
    poisoned = x.masked_fill(~mask[:, None, :, None], math.nan)
    found = outputs_and_gradients(poisoned, weight, mask, tail)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not found[2].masked_select(~mask[:, None, :, None]).any()


@pytest.mark.usefixtures("small_blocks")
def test_a_token_that_is_no_number_reaches_those_within_the_filter():
    x, weight, *_ = case((1, 1, 40, WIDTH))
    intact, _ = causal_convolution(x, weight, backend="triton")
    x[0, 0, 14] = math.nan
    found, _ = causal_convolution(x, weight, backend="triton")
    reached = torch.arange(14, 14 + SIZE)
    assert found[0, 0, reached].isnan().all()
    found[0, 0, reached] = intact[0, 0, reached]
    assert torch.equal(found, intact)


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_give_the_same_and_the_gradient_lies_as_x_does():
    x, weight, mask, tail = case((2, 2, 5, 6), tail=True, masked=True)
    plain = outputs_and_gradients(x, weight, mask, tail)
    between = x.transpose(1, 2).contiguous().transpose(1, 2)
    inside = x.transpose(1, 3).contiguous().transpose(1, 3)
    part = torch.cat([x, x], 3)[..., :6]
    turned = weight.mT.contiguous().mT
    of_batch = mask.T.contiguous().T
    for one in (between, inside, part):
        assert one.stride() != x.stride()
        found = outputs_and_gradients(one, turned, of_batch, tail.mT.contiguous().mT)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert outputs_and_gradients(between, weight, mask, tail, given=("output",))[2].stride() == between.stride()


@pytest.mark.usefixtures("small_blocks")
def test_an_expanded_gradient_is_taken():
    x, weight, *_ = case()
    for tensor in (x, weight):
        tensor.requires_grad_()
    found, expected = (
        torch.autograd.grad(causal_convolution(x, weight, backend=backend)[0].sum(), [x, weight])
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("small_blocks")
def test_the_same_call_gives_the_same_bits():
    given = case((1, 1, 40, 9))
    first, second = (outputs_and_gradients(*given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tail", [False, True])
def test_of_no_tokens_the_tail_goes_through_and_the_filters_have_gradients_of_zero(tail):
    assert max(relative_errors(case((2, 1, 0, 7), tail=tail))) == 0.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, weight, tail: (x.bfloat16(), weight, None), "no bfloat16"),
        (lambda x, weight, tail: (x.double(), weight, None), r"got torch\.float64"),
        (lambda x, weight, tail: (x, weight.long(), None), "weight of floating point"),
        (lambda x, weight, tail: (x, weight, tail.double()), r"tail in .*, got torch\.float64"),
        (lambda x, weight, tail: (x[:1, :1, :1].expand(1, 2**9, 2**21, WIDTH), weight, None), "fewer than 2"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(change, reason):
    x, weight, _, tail = case(tail=True)
    with pytest.raises(RuntimeError, match=reason):
        causal_convolution_backend(*change(x, weight, tail), backend="triton")


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    x, weight, *_ = case()
    assert causal_convolution_backend(x, weight, backend="triton") == "triton"
    assert causal_convolution_backend(x, weight) == "reference"
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        causal_convolution_backend(x, weight, backend="cuda")


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("small_blocks")
def test_a_tensor_with_a_tangent_is_refused():
    x, weight, *_ = case((1, 1, 5, 3))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: causal_convolution(x, weight, backend="triton")[0], (x,), (x,))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("continued", first_always([True, False]))
@pytest.mark.parametrize("transposed", first_always([True, False]))
def test_it_is_an_operator_whose_fake_says_where_numbers_lie(transposed, continued):
    """Compiled code trusts the fake's strides."""
    x, weight, mask, tail = case((1, 2, 3, 6), tail=continued, masked=continued)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    given = (x, weight.mT.contiguous(), mask, tail)
    names = torch.ops.polysketch
    torch.library.opcheck(names.causal_convolution.default, given)
    torch.library.opcheck(names.causal_convolution_backward.default, (torch.ones_like(x), *given))


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_a_layers_projections_are_convolved_by_the_programs_whole_and_in_pieces_but_for_single_tokens(launched):
    module = ProjectionConvolution(12, 3)
    torch.nn.init.normal_(module.filter)
    projected = torch.randn(2, 30, 12, requires_grad=True)
    whole, tail = module(projected)
    assert launched.count("causal_convolution") == 2  # one compares with the definition
    before = module.init_tail(2)
    pieces = []
    for piece in projected[:, :29].split((20, 9), 1):
        output, before = module(piece, tail=before)
        pieces.append(output)
    launched.clear()
    last, before = module(projected[:, 29:], tail=before)
    assert launched == []
    torch.testing.assert_close(torch.cat([*pieces, last], 1), whole)
    assert torch.equal(tail, before)
    whole.sum().backward()
    assert launched == ["causal_convolution_backward"]


@pytest.mark.full
@pytest.mark.usefixtures("programs_on_a_cpu")
def test_values_are_convolved_by_the_programs_to_both_sides_too(launched):
    x, weight, mask, _ = case((2, 2, 20, 6), 3, lead=(1, 6), masked=True)
    found = ops.centred_convolution(x, weight, key_mask=mask)
    assert launched.count("causal_convolution") == 2
    torch.testing.assert_close(found, ops.centred_convolution(x.double(), weight, key_mask=mask).float())


@pytest.mark.full
@pytest.mark.usefixtures("programs_on_a_cpu")
def test_compiled_and_exported_graphs_have_pytorchs_operations(launched):
    module = ProjectionConvolution(12, 3)
    projected = torch.randn(2, 30, 12)
    graph = torch.export.export(module, (projected,)).graph
    assert "polysketch" not in str(graph)
    assert "addcmul" in str(graph)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(projected)[0], module(projected)[0])
    assert launched.count("causal_convolution_backward") == 1  # of the call that was not compiled: its comparison


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_programs_that_disagree_are_named_and_the_definition_is_taken(monkeypatch):
    x, weight, *_ = case()
    monkeypatch.setattr(forward, "load_tap", a_tap_too_far)
    with pytest.warns(UserWarning, match="disagree with plain PyTorch.*causal_convolution"):
        found = causal_convolution(x, weight)
    expected = causal_convolution(x, weight, backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@compiler.jit
def a_tap_too_far(taps, tap, columns, WIDTH: tl.constexpr):
    return load_its_tap(taps, tap // 2, columns, WIDTH)


@compiler.jit
def without_a_mask(x, x_token, key_mask, tail, tokens, length, columns, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    return load_intact(x, x_token, None, tail, tokens, length, columns, WIDTH, SIZE)


@compiler.jit
def without_a_tail(x, x_token, key_mask, tail, tokens, length, columns, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    return load_intact(x, x_token, key_mask, None, tokens, length, columns, WIDTH, SIZE)


@compiler.jit
def all_tokens(key_mask, tokens, length):
    return tokens < length


@compiler.jit
def twice(sums, tap, products, columns, WIDTH: tl.constexpr):
    add_all(sums, tap, 2 * products, columns, WIDTH)


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        # Output, tail after it, gradients of x, filters and tail.
        (forward, "load_tap", a_tap_too_far, [True, False, False, False, False]),
        (forward, "load_seen", without_a_mask, [True, False, False, False, False]),
        (forward, "load_seen", without_a_tail, [True, False, False, False, False]),
        (backward, "load_tap", a_tap_too_far, [False, False, True, False, True]),
        (backward, "load_seen", without_a_mask, [False, False, False, True, False]),
        (backward, "load_seen", without_a_tail, [False, False, False, True, False]),
        (backward, "real_tokens", all_tokens, [False, False, True, False, False]),
        (backward, "add_up", twice, [False, False, False, True, False]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    given = case(tail=True, masked=True)
    monkeypatch.setattr(module, name, broken)
    assert [one > 1e-2 for one in relative_errors(given)] == wrong
