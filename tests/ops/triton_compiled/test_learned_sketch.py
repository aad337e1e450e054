"""The programs of the learned sketch, in their shipped configurations, as compiled for devices that are not there."""

import functools

import pytest
import torch

from polysketch.ops.learned_sketch import triton
from polysketch.ops.learned_sketch.networks import Networks
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

PRODUCTS = {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}
# The others with the full product: half a minute for each.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]


def network(inputs: int, size: int, depth: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Its weights, four of each stage, without memory."""
    widths = [inputs, *[size] * (depth - 1)]
    shapes = [shape for width in widths for shape in ((width,), (width,), (8 * size, width), (size, 8 * size))]
    return [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]


@functools.cache
def compiled_sketch(
    capability: tuple[int, int],
    head_dim: int,
    size: int,
    *,
    degree: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    depth: int = 2,
    activation: str = "gelu",
) -> list[Compiled]:
    """Every program of a call, forward and backward."""
    networks = Networks(degree // 2, depth, activation)
    inputs = [head_dim] * networks.leaves + [size] * (networks.leaves - 2)
    weights = [weight for width in inputs for weight in network(width, size, depth, torch.float32)]
    x, grad = (torch.empty(2, 4, 1024, width, device="meta", dtype=dtype) for width in (head_dim, size))
    with compiling(capability) as found:
        triton.forward([x], weights, networks)
        triton.backward([grad], [x], weights, networks)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.opcodes[PRODUCTS[capability]] > 0, (
            f"{one.name} multiplies no matrices; the compiler may have given up"
        )
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.full
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_shared_memory_is_enough_and_products_run_on_tensor_cores(capability, size):
    programs = compiled_sketch(capability, 64, size)
    assert len(programs) == 6
    assert_well_made(programs, capability)


@pytest.mark.full
def test_small_networks_stay_in_shared_memory_where_it_is_large():
    forward, *_ = compiled_sketch((9, 0), 64, 32)
    assert forward.name == "learned_sketch_resident"
    assert forward.shared > 2 * 2 * (256 * 64 + 3 * 256 * 32)  # all weights of two networks


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize(
    ("depth", "activation"),
    [
        (1, "relu"),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((3, "gelu"), (2, "relu"), (2, "silu"))),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_in_networks_of_another_depth_and_activation(capability, depth, activation):
    programs = compiled_sketch(capability, 64, 32, depth=depth, activation=activation)
    assert len(programs) == 2 + 2 * depth
    assert_well_made(programs, capability)


@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "size", "degree"), [(128, 32, 4), (128, 64, 4), (128, 128, 4), (64, 32, 8)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_wider_heads_larger_sketches_and_higher_degrees(
    capability, head_dim, size, degree
):
    assert_well_made(compiled_sketch(capability, head_dim, size, degree=degree), capability)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_four_byte_operands_fit_into_shared_memory(capability, dtype):
    """They may spill: float32 products in full precision run on no tensor cores."""
    for one in compiled_sketch(capability, 64, 64, dtype=dtype):
        assert all("spills" in complaint for complaint in complaints(one, capability))
