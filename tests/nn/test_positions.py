"""Both kinds of position embedding: rotations depend on distance alone, any position will do."""

import math

import pytest
import torch

from polysketch.nn import (
    apply_rotation,
    rope,
    rotation_at,
    rotation_on_grid,
    sinusoidal_positions,
    sinusoidal_positions_on_grid,
)


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> torch.Tensor:
        rotated = (apply_rotation(x, rotation_at(torch.tensor([at]), 8)) for x, at in ((query, i), (key, j)))
        return (next(rotated) * next(rotated)).sum()

    torch.testing.assert_close(product(7, 3), product(100_007, 100_003), rtol=1e-5, atol=1e-5)
    assert (product(7, 3) - product(7, 4)).abs() > 0.01


def test_the_rotation_is_the_published_one():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    rotated = apply_rotation(x, rotation_at(torch.tensor([5]), 4))[0, 0, 0]
    angles = (5.0, 5.0 / 100.0)  # 10000^(-2 i / 4)
    for pair, angle in enumerate(angles):
        first, second = x[0, 0, 0, pair].item(), x[0, 0, 0, pair + 2].item()
        assert rotated[pair].item() == pytest.approx(first * math.cos(angle) - second * math.sin(angle))
        assert rotated[pair + 2].item() == pytest.approx(second * math.cos(angle) + first * math.sin(angle))


def test_rotation_keeps_length_and_dtype():
    x = torch.randn(2, 3, 10, 8).bfloat16()
    rotated = apply_rotation(x, rotation_at(torch.arange(10), 8))
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float().norm(dim=-1), x.float().norm(dim=-1), rtol=0.02, atol=0)


def test_rows_may_have_positions_of_their_own():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    rotated = apply_rotation(x, rotation_at(positions, 8))
    for row in range(2):
        expected = apply_rotation(x[row : row + 1], rotation_at(positions[row], 8))
        torch.testing.assert_close(rotated[row : row + 1], expected)


def test_far_positions_are_exact():
    position = 12_345_678
    rotation = rotation_at(torch.tensor([position]), 4)
    assert rotation.cos[0, 0].item() == pytest.approx(math.cos(position), abs=1e-6)
    assert rotation.sin[0, 1].item() == pytest.approx(math.sin(position / 100), abs=1e-6)


def test_sinusoids_interleave_sine_and_cosine():
    embedded = sinusoidal_positions(torch.tensor([0, 3]), 4)
    expected = [[0, 1, 0, 1], [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]]
    torch.testing.assert_close(embedded, torch.tensor(expected))
    assert sinusoidal_positions(torch.zeros(2, 5, dtype=torch.int64), 6).shape == (2, 5, 6)


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="even head_dim, got 7"):
        rotation_at(torch.arange(3), 7)
    with pytest.raises(ValueError, match="even width, got 5"):
        sinusoidal_positions(torch.arange(3), 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation_in_place_is_the_formula_with_its_gradients(dtype):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    rotation = rotation_at(torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), 8)
    rounded = x.to(dtype)
    found, expected = apply_rotation(rounded, rotation), rope._formula(rounded, *rotation)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda y: apply_rotation(y, rotation), (x,), fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda y: apply_rotation(y, rotation), (x,), fast_mode=True)


def test_on_a_grid_products_depend_on_rows_and_columns_between_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 30, 8)
    rotation = rotation_on_grid((5, 6), 8)
    products = (apply_rotation(query, rotation) @ apply_rotation(key, rotation).mT)[0, 0].view(5, 6, 5, 6)
    torch.testing.assert_close(products[0, 0, 2, 3], products[2, 1, 4, 4], rtol=1e-6, atol=1e-6)
    assert (products[0, 0, 2, 3] - products[0, 0, 3, 2]).abs() > 0.01
    assert (products[0, 0, 2, 3] - products[0, 0, 2, 4]).abs() > 0.01


def test_class_tokens_before_a_grid_are_not_rotated():
    x = torch.randn(1, 2, 2 + 6, 8)
    rotated = apply_rotation(x, rotation_on_grid((2, 3), 8, class_tokens=2))
    assert torch.equal(rotated[:, :, :2], x[:, :, :2])
    torch.testing.assert_close(rotated[:, :, 2:], apply_rotation(x[:, :, 2:], rotation_on_grid((2, 3), 8)))
    assert (rotated[:, :, 3:] - x[:, :, 3:]).abs().amax(-1).min() > 0.01


def test_a_grid_has_the_rows_sinusoids_and_then_the_columns():
    embedded = sinusoidal_positions_on_grid((2, 3), 8).view(2, 3, 8)
    for row in range(2):
        for column in range(3):
            expected = [sinusoidal_positions(torch.tensor([at]), 4)[0] for at in (row, column)]
            torch.testing.assert_close(embedded[row, column], torch.cat(expected))


def test_widths_that_two_sides_cannot_share_are_refused():
    with pytest.raises(ValueError, match="head_dim that is a multiple of 4, got 6"):
        rotation_on_grid((2, 3), 6)
    with pytest.raises(ValueError, match="width that is a multiple of 4, got 6"):
        sinusoidal_positions_on_grid((2, 3), 6)
