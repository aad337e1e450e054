"""The programs of polynomial attention as compiled for devices that need not be there, as they are configured."""

import pytest
import torch

from polysketch import ops
from polysketch.ops.triton.ahead_of_time import Compiled, compile_call, complaints

CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PRODUCTS = {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}


def compiled_attention(capability: tuple[int, int], head_dim: int, *, shared: int = 1, **options) -> list[Compiled]:
    """The three programs, forward and backward, of 4 key heads in bfloat16."""
    heads = (4 * shared, 4, 4)
    inputs = [torch.empty(1, n, 4096, head_dim, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in heads]

    def attend() -> None:
        output = ops.polynomial_attention(*inputs, backend="triton", **options)
        torch.autograd.grad(output, inputs, torch.empty_like(output))

    return compile_call(attend, capability)


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == [
        "polynomial_forward",
        "polynomial_grad_query",
        "polynomial_grad_key_value",
    ]
    for one in programs:
        assert not complaints(one, capability), one.name
        assert one.opcodes[PRODUCTS[capability]] > 0, one.name
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.full)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_shared_memory_is_enough_and_products_run_on_tensor_cores(capability, head_dim):
    assert_well_made(compiled_attention(capability, head_dim, causal=True), capability)


@pytest.mark.full
def test_nor_with_shared_heads_a_mask_and_a_higher_degree():
    key_mask = torch.empty(1, 4096, device="meta", dtype=torch.bool)
    options = {"causal": True, "shared": 4, "key_mask": key_mask, "degree": 8, "scale": 0.3}
    assert_well_made(compiled_attention((9, 0), 64, **options), (9, 0))
