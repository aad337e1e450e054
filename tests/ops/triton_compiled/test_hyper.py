"""The programs of HyperAttention as compiled for devices that need not be there, as they are configured."""

import pytest
import torch

from polysketch import ops
from polysketch.benchmarking.program_calls import program_calls
from polysketch.ops.triton.ahead_of_time import Compiled, compile_call, complaints

COMMON = {call.name: call for call in program_calls(("hyper",), ("bfloat16",))}
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PRODUCTS = {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}
OF_TILES = {"hyper_tile_forward", "hyper_tile_grad_query", "hyper_tile_grad_key_value"}
OF_BLOCKS = {"hyper_block_forward", "hyper_block_grad_query", "hyper_block_grad_key_value"}


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize(
    "name",
    [
        "hyper h=64",
        *(pytest.param(other, marks=pytest.mark.full) for other in ("hyper h=128", "hyper h=64, not causal")),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_shared_memory_is_enough_and_products_run_on_tensor_cores(capability, name):
    call = COMMON[name].build(torch.device("meta"), 1, 4, 3_000)
    products = OF_TILES if "not causal" in name else OF_TILES | OF_BLOCKS
    assert_well_made(compile_call(lambda: COMMON[name].passes(call)(), capability), products, capability)


@pytest.mark.full
def test_nor_with_shared_heads_of_other_widths_and_a_mask():
    shapes = [(4, 96), (2, 96), (2, 48)]
    inputs = [
        torch.empty(2, n, 3_000, width, device="meta", dtype=torch.bfloat16, requires_grad=True) for n, width in shapes
    ]
    mask, planes = torch.empty(2, 3_000, device="meta", dtype=torch.bool), torch.empty(96, 7, device="meta")
    options = {"hyperplanes": planes, "causal": True, "key_mask": mask, "min_length": 1_000, "backend": "triton"}

    def attend() -> None:
        output = ops.hyper_attention(*inputs, **options)
        torch.autograd.grad(output, inputs, torch.empty_like(output))

    assert_well_made(compile_call(attend, (9, 0)), OF_TILES | OF_BLOCKS, (9, 0))


def assert_well_made(found: list[Compiled], products: set[str], capability: tuple[int, int]) -> None:
    assert {one.name for one in found} == products | {"hyper_sum_by_key"}
    assert [complaint for one in found for complaint in complaints(one, capability)] == []
    assert all(one.opcodes[PRODUCTS[capability]] > 0 for one in found if one.name in products)
    assert all(one.opcodes["F2F"] == 0 for one in found), "numbers are converted one by one, at a sixteenth of the rate"
