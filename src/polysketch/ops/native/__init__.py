"""Programs in C++ for the CPU, compiled with the machine's own compiler when they are first needed, and kept."""

from polysketch.ops.native.build import fingerprint, library, why_unavailable
from polysketch.ops.native.tensors import TensorPointer, run_in_threads, run_program, shares_of, why_not

__all__ = [
    "TensorPointer",
    "fingerprint",
    "library",
    "run_in_threads",
    "run_program",
    "shares_of",
    "why_not",
    "why_unavailable",
]
