"""Programs of decoding as compiled, for devices that need not be there: nothing spills, chunks fold on tensor cores."""

import pytest
import torch

from polysketch import ops
from polysketch.ops.linear.triton.decoding import extend_one_
from polysketch.ops.linear.types import Diagonal, Inputs, Plan
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]


def compiled_step(
    capability: tuple[int, int],
    *,
    features: int,
    chunk: int,
    decays: bool = False,
    shared: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Compiled]:
    """The programs of one step of heads of 64."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, *shape, device="meta", dtype=dtype)

    local_dim = 64 if chunk else 0
    state = ops.LinearAttentionState.init(
        1, 4, features, 64, power=2, local_chunk=chunk, local_dim=local_dim, device="meta"
    )
    local = ops.LocalPolynomial(empty(4 * shared, 1, 64), empty(4, 1, 64), 4, chunk) if chunk else None
    rows = (empty(4 * shared, 1, features), empty(4, 1, features), empty(4, 1, 64))
    local_query, local_key, degree, _ = local or (None, None, 2, 0)
    inputs = Inputs(*rows, local_query, local_key, empty(4, 1) if decays else None)
    with compiling(capability) as found:
        extend_one_(inputs, Plan(2, 1, True, 1.0, True, degree, chunk, Diagonal.CAUSAL, True), state)
    return found


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"features": 32, "chunk": 256}, marks=pytest.mark.full),
        pytest.param({"features": 64, "chunk": 1024, "decays": True, "shared": 2}, marks=pytest.mark.full),
        {"features": 32, "chunk": 0, "decays": True},
        pytest.param({"features": 64, "chunk": 256, "dtype": torch.float32}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_nothing_spills_and_shared_memory_is_enough(capability, options):
    extend, finish = compiled_step(capability, **options)
    assert (extend.name, finish.name) == ("linear_extend", "linear_extend_finish")
    assert complaints(extend, capability) == complaints(finish, capability) == []
    in_half = options.get("dtype") != torch.float32
    assert (extend.tensor_core > 0) == (options["chunk"] > 0 and in_half)
