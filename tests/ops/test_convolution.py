"""Depthwise convolutions over tokens against their sums written out, in pieces, with padding and compiled."""

import pytest
import torch
from torch import Tensor

from attention.covering import first_always
from polysketch import ops

BATCH, HEADS, LENGTH, WIDTH, SIZE = 2, 3, 23, 4, 5
WEIGHT_SHAPES = [(HEADS, WIDTH), (1, WIDTH), (HEADS, 1), (1, 1)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(length: int = LENGTH) -> Tensor:
    return draw(BATCH, HEADS, length, WIDTH, seed=1)


def written_out(x: Tensor, weight: Tensor, future: int) -> Tensor:
    """y_i = sum_t weight_t x_{i + future - (size - 1) + t}, one product at a time."""
    heads, width, size, length = x.shape[1], x.shape[3], weight.shape[2], x.shape[2]
    weight, output = weight.expand(heads, width, size), torch.zeros_like(x)
    for i in range(length):
        for t in range(size):
            source = i + future - (size - 1) + t
            if 0 <= source < length:
                output[:, :, i] += weight[..., t] * x[:, :, source]
    return output


def written_out_2d(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """The same sum over rows and columns of a picture."""
    rows, columns = weight.shape[2:]
    picture, output = x.unflatten(2, (height, width)), torch.zeros_like(x).unflatten(2, (height, width))
    weight = weight.expand(x.shape[1], x.shape[3], rows, columns)
    for i, j, r, c in torch.cartesian_prod(*(torch.arange(n) for n in (height, width, rows, columns))).tolist():
        row, column = i + r - rows // 2, j + c - columns // 2
        if 0 <= row < height and 0 <= column < width:
            output[:, :, i, j] += weight[..., r, c] * picture[:, :, row, column]
    return output.flatten(2, 3)


@pytest.mark.parametrize("lead", WEIGHT_SHAPES)
@pytest.mark.parametrize("length", [1, 2, LENGTH])
@pytest.mark.parametrize("size", [1, 2, SIZE])
def test_a_causal_convolution_is_its_sum_with_the_own_token_last(size: int, length: int, lead: tuple[int, int]):
    x, weight = tokens(length), draw(*lead, size)
    output, tail = ops.causal_convolution(x, weight)
    torch.testing.assert_close(output, written_out(x, weight, 0))
    padded = torch.nn.functional.pad(x, (0, 0, size - 1, 0))
    assert torch.equal(tail, padded[:, :, length:])


@pytest.mark.parametrize("lead", WEIGHT_SHAPES)
@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_a_centred_convolution_is_its_sum_with_the_own_token_in_the_middle(length: int, lead: tuple[int, int]):
    x, weight = tokens(length), draw(*lead, SIZE)
    torch.testing.assert_close(ops.centred_convolution(x, weight), written_out(x, weight, SIZE // 2))


@pytest.mark.parametrize("lead", WEIGHT_SHAPES)
@pytest.mark.parametrize("grid", [(1, 1), (4, 5), (3, 2)])
def test_a_two_dimensional_convolution_is_its_sum_over_rows_and_columns(grid: tuple[int, int], lead: tuple[int, int]):
    x, weight = tokens(grid[0] * grid[1]), draw(*lead, 5, 3)
    torch.testing.assert_close(ops.depthwise_convolution_2d(x, weight, *grid), written_out_2d(x, weight, *grid))


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [3, 1, 1, 10, 2, 6], [22, 1]])
def test_a_sequence_in_pieces_gives_what_it_gives_whole(sizes: list[int]):
    x, weight = tokens(), draw(HEADS, WIDTH, SIZE)
    expected, expected_tail = ops.causal_convolution(x, weight)
    outputs, tail = [], None
    for piece in x.split(sizes, 2):
        output, tail = ops.causal_convolution(piece, weight, tail=tail)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), expected)
    assert torch.equal(tail, expected_tail)


def test_a_tail_does_not_keep_the_sequence_alive():
    _, tail = ops.causal_convolution(tokens(), draw(1, 1, SIZE))
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


@pytest.mark.parametrize("count", [1, 3, 9])
def test_left_padding_changes_nothing(count: int):
    x, weight = tokens(), draw(HEADS, WIDTH, SIZE)
    padded = torch.nn.functional.pad(x, (0, 0, count, 0), value=float("nan"))
    mask = torch.arange(LENGTH + count).expand(BATCH, -1) >= count
    output, tail = ops.causal_convolution(padded, weight, key_mask=mask)
    expected, expected_tail = ops.causal_convolution(x, weight)
    torch.testing.assert_close(output[:, :, count:], expected)
    assert torch.equal(tail, expected_tail)
    centred = ops.centred_convolution(padded, weight, key_mask=mask)[:, :, count:]
    torch.testing.assert_close(centred, ops.centred_convolution(x, weight))


def test_masked_tokens_count_as_zeros():
    x, mask = tokens(20), torch.ones(BATCH, 20, dtype=torch.bool)
    mask[0, 4:6] = mask[1, 18] = False
    zeroed, line, patch = x * mask[:, None, :, None], draw(1, WIDTH, SIZE), draw(1, WIDTH, 3, 3)
    output, tail = ops.causal_convolution(x, line, key_mask=mask)
    torch.testing.assert_close((output, tail), ops.causal_convolution(zeroed, line))
    masked = ops.depthwise_convolution_2d(x, patch, 4, 5, key_mask=mask)
    torch.testing.assert_close(masked, ops.depthwise_convolution_2d(zeroed, patch, 4, 5))


def test_gradients_are_those_of_finite_differences():
    x, tail, weight = (t.requires_grad_() for t in (draw(1, 2, 6, 2), draw(1, 2, 2, 2, seed=1), draw(2, 2, 3, seed=2)))
    patch, one = draw(1, 2, 3, 3).requires_grad_(), x[:, :, :1]
    mask = torch.tensor([[False, True, True, True, False, True]])
    assert torch.autograd.gradcheck(
        lambda x, w, t: ops.causal_convolution(x, w, tail=t, key_mask=mask), (x, weight, tail)
    )
    assert torch.autograd.gradcheck(lambda x, w, t: ops.causal_convolution(x, w, tail=t), (one, weight, tail))
    assert torch.autograd.gradcheck(ops.centred_convolution, (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: ops.depthwise_convolution_2d(x, w, 2, 3), (x, patch))


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("lead", first_always(WEIGHT_SHAPES, 2))
def test_gradients_and_theirs_are_those_of_finite_differences_however_heads_share_filters(lead: tuple[int, int]):
    x, weight = draw(1, HEADS, 4, WIDTH).requires_grad_(), draw(*lead, 3).requires_grad_()

    def output(x: Tensor, weight: Tensor) -> Tensor:
        return ops.causal_convolution(x, weight)[0]

    assert torch.autograd.gradcheck(output, (x, weight))
    assert torch.autograd.gradgradcheck(output, (x, weight))
    tangents = (draw(*x.shape, seed=5), draw(*weight.shape, seed=6))
    _, both = torch.func.jvp(output, (x.detach(), weight.detach()), tangents)
    of_x, of_weight = output(tangents[0], weight), output(x, tangents[1])
    torch.testing.assert_close(both, of_x + of_weight)
    _, one = torch.func.jvp(lambda w: output(x.detach(), w), (weight.detach(),), tangents[1:])
    torch.testing.assert_close(one, of_weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_summed_in_float32(dtype: torch.dtype):
    x, weight = tokens(20).to(dtype), draw(HEADS, WIDTH, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        output, tail = ops.causal_convolution(x, weight)
        picture = ops.depthwise_convolution_2d(x, weight[..., None], 20, 1)
    assert output.dtype == tail.dtype == picture.dtype == dtype
    exact = ops.causal_convolution(x.double(), weight)[0]
    # Rounded once, at the end: as near as the dtype allows.
    torch.testing.assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-6)
    exact = ops.centred_convolution(x.double(), weight)
    torch.testing.assert_close(picture.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-6)


def test_a_wider_tail_keeps_its_dtype():
    x, weight = tokens().bfloat16(), draw(1, WIDTH, SIZE).float()
    tail = tokens(SIZE - 1).float()
    output, after = ops.causal_convolution(x, weight, tail=tail)
    assert (output.dtype, after.dtype) == (torch.bfloat16, torch.float32)


def test_convolutions_compile_into_one_graph():
    def all_three(x: Tensor, line: Tensor, patch: Tensor, tail: Tensor):
        causal = ops.causal_convolution(x, line, tail=tail)
        return *causal, ops.centred_convolution(x, line), ops.depthwise_convolution_2d(x, patch, 4, 5)

    inputs = tokens(20), draw(HEADS, WIDTH, SIZE), draw(1, WIDTH, 3, 3), tokens(SIZE - 1)
    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), all_three(*inputs))


def test_shapes_that_do_not_fit_are_refused():
    x, weight, mask = tokens(20), draw(1, WIDTH, SIZE), torch.ones(BATCH, 20, dtype=torch.bool)
    for wrong in (weight[0], draw(2, WIDTH, SIZE), draw(1, 2, SIZE), draw(1, WIDTH, 0)):
        with pytest.raises(ValueError, match=r"weight must be \(3 or 1, 4 or 1, size\), got"):
            ops.causal_convolution(x, wrong)
    with pytest.raises(ValueError, match=r"x must be \(batch, heads, length, width\)"):
        ops.causal_convolution(x[0], weight)
    with pytest.raises(TypeError, match="x must be floating point"):
        ops.causal_convolution(x.long(), weight)
    with pytest.raises(ValueError, match=r"tail must be .* = \(2, 3, 4, 4\), got"):
        ops.causal_convolution(x, weight, tail=tokens(SIZE))
    with pytest.raises(ValueError, match=r"key_mask must be \(batch, length\) = \(2, 20\)"):
        ops.causal_convolution(x, weight, key_mask=mask[:, :3])
    with pytest.raises(TypeError, match="key_mask must be bool"):
        ops.causal_convolution(x, weight, key_mask=mask.float())
    with pytest.raises(ValueError, match="odd number of taps to have a middle, got 4"):
        ops.centred_convolution(x, draw(1, WIDTH, 4))
    with pytest.raises(ValueError, match="a grid of 4 x 6 holds 24 tokens, got a length of 20"):
        ops.depthwise_convolution_2d(x, draw(1, WIDTH, 3, 3), 4, 6)
    with pytest.raises(ValueError, match=r"got 3 x 2"):
        ops.depthwise_convolution_2d(x, draw(1, WIDTH, 3, 2), 4, 5)
