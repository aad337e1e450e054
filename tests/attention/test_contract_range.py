"""float16 has a small range: wide heads and large entries are attended to all the same, forward and decoding."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, Case, others_full
from polysketch import attention

HEAD_DIM, LENGTH, SIZE = 128, 20, 16.0
LARGEST = torch.finfo(torch.float16).max


@pytest.mark.parametrize("case", others_full([case for case in CASES if case.widest_head is None]), ids=str)
@torch.no_grad()
def test_large_entries_of_float16_give_no_wrong_number(case: Case):
    mechanism = case.build(dtype=torch.float32, head_dim=HEAD_DIM, num_heads=2, num_kv_heads=2).half()
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": HEAD_DIM, "length": LENGTH}
    query, key, value, hidden = case.inputs(dtype=torch.float16, **sizes)
    inputs = (SIZE * query, SIZE * key, value, hidden)
    found = forward_and_decoding(mechanism, inputs)
    expected = forward_and_decoding(deepcopy(mechanism).double(), tuple(x.double() for x in inputs))
    for output, exact in zip(found, expected, strict=True):
        inside = exact.abs() < 0.99 * LARGEST
        assert output.dtype == torch.float16
        assert output[inside].isfinite().all()
        assert (output[inside] - exact[inside]).norm() <= 0.02 * exact[inside].norm()
        assert output[exact.abs() > 1.01 * LARGEST].isinf().all()


def forward_and_decoding(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    query, key, value, hidden = inputs
    outputs = [mechanism(query, key, value, hidden=hidden, causal=mechanism.is_causal)]
    if mechanism.is_causal:
        state = mechanism.init_state(1, dtype=torch.float64 if value.dtype == torch.float64 else None)
        outputs.append(mechanism.extend(query, key, value, state, hidden=hidden)[0])
    return outputs
