"""The block without autocast: off within, as it was afterwards, and nothing entered where it is off already."""

import contextlib

import pytest
import torch

from polysketch.ops.autocast import without_autocast


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_is_off_within_and_as_it_was_afterwards(enabled):
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        with without_autocast("cpu"):
            assert (left @ right).dtype is torch.float32
        assert (left @ right).dtype is (torch.bfloat16 if enabled else torch.float32)


def test_nothing_is_entered_where_it_is_off_or_the_device_has_none():
    assert isinstance(without_autocast("cpu"), contextlib.nullcontext)
    assert isinstance(without_autocast("meta"), contextlib.nullcontext)


def test_an_exported_graph_keeps_the_block():
    class Product(torch.nn.Module):
        def forward(self, left, right):
            with without_autocast("cpu"):
                return left @ right

    given = torch.ones(2, 2), torch.ones(2, 2)
    exported = torch.export.export(Product(), given).module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exported(*given).dtype is torch.float32


def test_a_compiler_sees_a_block_that_leaves_autocast_off():
    def product(left, right):
        with without_autocast("cpu"):
            return left @ right

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    given = torch.ones(2, 2), torch.ones(2, 2)
    assert compiled(*given).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(*given).dtype is torch.float32
