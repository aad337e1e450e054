"""Under the interpreter the programs take CPU tensors, but none that it would compute wrongly."""

import pytest
import torch

from polysketch.ops import triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cpu_tensors_are_taken_under_the_interpreter(dtype: torch.dtype) -> None:
    assert triton.why_not(torch.ones(1, dtype=dtype)) is None


@pytest.mark.parametrize(("dtype", "reason"), [(torch.bfloat16, "no bfloat16 products"), (torch.float64, "float64")])
def test_dtypes_it_would_compute_wrongly_are_refused(dtype: torch.dtype, reason: str) -> None:
    assert reason in (triton.why_not(torch.ones(1, dtype=dtype)) or "")
