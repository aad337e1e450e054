"""HyperAttention's programs in bfloat16, executed on a CPU, beside the plain formula of the same meetings."""

from functools import partial

import pytest
import torch

from attention.covering import first_always
from device.test_hyper import by_formula, by_programs, meeting
from device.yardstick import Device, assert_as_good_as_plain, rounded
from ptx.test_programs import CPU, DTYPE

# Width of heads, width of values, query heads of a key head, tokens.
SIZES = [(20, 33, 2, 45), (64, 64, 1, 70), (16, 16, 2, 70), (128, 48, 1, 45), (7, 3, 2, 70), (40, 128, 2, 45)]
OF_TILES = {"hyper_tile_forward", "hyper_tile_grad_query", "hyper_tile_grad_key_value", "hyper_sum_by_key"}
OF_BLOCKS = {"hyper_block_forward", "hyper_block_grad_query", "hyper_block_grad_key_value"}


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("size", first_always(SIZES, 1), ids=str)
def test_hyper_attention_errs_like_the_plain_formula(size, causal, launched):
    width, value_width, shared, tokens = size
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (shared, tokens, width), "key": (1, tokens, width), "value": (1, tokens, value_width)}
    # The mask of a call without order is of two rows.
    rows = 1 if causal else 2
    given = {name: torch.randn(rows, *x, generator=generator, dtype=torch.float64) for name, x in shapes.items()}
    met = meeting(rounded(given, DTYPE), causal, Device("cpu"))
    attend, formula = partial(by_programs, met, "triton"), partial(by_formula, met)
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched.keys() == OF_TILES | (OF_BLOCKS if causal else set())
