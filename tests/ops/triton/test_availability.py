"""Under the interpreter the programs take CPU tensors, but none that it would compute wrongly."""

import subprocess
import sys

import pytest
import torch

from polysketch.ops import triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cpu_tensors_are_taken_under_the_interpreter(dtype: torch.dtype) -> None:
    assert triton.why_not(torch.ones(1, dtype=dtype)) is None


@pytest.mark.parametrize(("dtype", "reason"), [(torch.bfloat16, "no bfloat16 products"), (torch.float64, "float64")])
def test_dtypes_it_would_compute_wrongly_are_refused(dtype: torch.dtype, reason: str) -> None:
    assert reason in (triton.why_not(torch.ones(1, dtype=dtype)) or "")


SWITCHES = {
    "torch.set_float32_matmul_precision('high')": "tf32",
    "torch.set_float32_matmul_precision('high'); torch.set_float32_matmul_precision('highest')": "ieee",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "tf32",
    "torch.backends.fp32_precision = 'tf32'": "tf32",
}
FORKS = """
import os, sys, torch
from polysketch.ops.triton import precision
for switch in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(switch)
        print(precision(torch.float32), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_products_of_float32_follow_either_of_the_switches_of_pytorch():
    """Each in a process of its own: the two may not be mixed in one."""
    done = subprocess.run([sys.executable, "-c", FORKS, *SWITCHES], capture_output=True, text=True, check=False)
    assert dict(zip(SWITCHES, done.stdout.split(), strict=True)) == SWITCHES, done.stderr
