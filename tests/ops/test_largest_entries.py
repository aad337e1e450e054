"""The places of the largest entries, by the program and by PyTorch."""

import pytest
import torch

from polysketch import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "count"), [(64, 9), (5, 5), (7, 1), (300, 40)])
def test_they_are_those_that_sorting_by_size_puts_first(dtype: torch.dtype, width: int, count: int):
    """Rows of two threads' worth, of any strides."""
    x = torch.randn(40, width, 30, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(1, 2)
    found = ops.largest_entries(x, count)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), x.abs().sort(-1, descending=True).indices[..., :count])


def test_equal_entries_and_entries_of_nan_still_give_places_that_differ():
    x = torch.ones(3, 20)
    x[1], x[2, :4] = float("nan"), float("nan")
    found = ops.largest_entries(x, 6)
    assert found.min() >= 0
    assert found.max() < 20
    assert all(len(set(row)) == 6 for row in found.tolist())
    assert set(found[2, :4].tolist()) == {0, 1, 2, 3}  # as torch.topk: NaN is the largest


def test_it_has_no_gradient_and_keeps_pytorchs_rules():
    x = torch.randn(4, 20, requires_grad=True)
    assert not ops.largest_entries(x, 3).requires_grad
    torch.library.opcheck(torch.ops.polysketch.largest_entries.default, (x.detach(), 3))
    assert ops.largest_entries(x[:0], 3).shape == (0, 3)


@pytest.mark.parametrize("count", [0, 21])
def test_counts_out_of_range_are_refused(count: int):
    with pytest.raises(ValueError, match="count must be 1 to 20"):
        ops.largest_entries(torch.randn(4, 20), count)
