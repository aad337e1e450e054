"""The Walsh-Hadamard transform against its matrix."""

import pytest
import torch
from torch import Tensor

from polysketch import ops

WIDTHS = (1, 2, 8, 64)


def matrix(width: int) -> Tensor:
    """Sylvester's construction, by its recursion."""
    if width == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix(width // 2))


def rows(width: int) -> Tensor:
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_transform_is_the_product_with_the_matrix(width: int):
    torch.testing.assert_close(ops.hadamard_transform(rows(width)), rows(width) @ matrix(width))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_transform_is_its_own_inverse_up_to_the_width(width: int):
    torch.testing.assert_close(ops.hadamard_transform(ops.hadamard_transform(rows(width))), width * rows(width))


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_row_costs_width_times_its_logarithm_in_additions(width: int, monkeypatch):
    added, stack = 0, torch.stack

    def counting(tensors: list[Tensor], dim: int) -> Tensor:
        nonlocal added
        added += sum(tensor.numel() for tensor in tensors)
        return stack(tensors, dim)

    monkeypatch.setattr(torch, "stack", counting)
    ops.hadamard_transform(torch.ones(width))
    assert added == width * (width.bit_length() - 1)


def test_the_input_is_left_as_it_was_and_the_output_is_another_tensor():
    for width in WIDTHS:
        x = rows(width)
        ops.hadamard_transform(x).add_(1)
        assert torch.equal(x, rows(width))


def test_gradients_are_those_of_the_matrix():
    assert torch.autograd.gradcheck(ops.hadamard_transform, rows(8).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_stays(dtype: torch.dtype):
    assert ops.hadamard_transform(rows(8).to(dtype)).dtype == dtype


@pytest.mark.parametrize("width", [0, 3, 12])
def test_widths_that_are_no_power_of_two_are_refused(width: int):
    with pytest.raises(ValueError, match=f"a power of two, got {width}: pad with zeros"):
        ops.hadamard_transform(torch.ones(2, width))
