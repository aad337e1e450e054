"""Programs in C++ for the CPU, compiled with the machine's own compiler when they are first needed, and kept."""

from polysketch.ops.native.build import fingerprint, library, why_unavailable
from polysketch.ops.native.tensors import (
    TensorPointer,
    expect_writes,
    in_float32,
    run_in_threads,
    run_program,
    shares_of,
    why_not,
)

__all__ = [
    "TensorPointer",
    "expect_writes",
    "fingerprint",
    "in_float32",
    "library",
    "run_in_threads",
    "run_program",
    "shares_of",
    "why_not",
    "why_unavailable",
]
