"""Where Triton programs can run."""

import importlib.machinery
import os

import torch
from torch import Tensor

from polysketch.ops.triton import assembler

OLDEST_CAPABILITY = (8, 0)
"""Compute capability from which devices multiply bfloat16 matrices."""
AUTO_DEVICES = {"cuda"}
"""Types of devices on which "auto" picks the programs."""
_INSTALLED = importlib.machinery.PathFinder.find_spec("triton") is not None


def why_not(tensor: Tensor) -> str | None:
    """Why the programs cannot take a call whose tensors are like this one; None where they can.

    They run on CUDA devices, and, for tests, on a CPU under Triton's interpreter (TRITON_INTERPRET=1, set before Triton
    is imported); which has no bfloat16 products, so that they would be silently wrong there.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the triton backend computes float32, bfloat16 and float16, got {tensor.dtype}"
    if not _INSTALLED:
        return "the triton backend needs Triton: pip install triton"
    if tensor.device.type == "cuda":
        return _why_not_on(tensor.device.index or 0)
    if tensor.device.type == "meta":
        return None
    if not interpreting():
        return f"the triton backend runs on CUDA devices, got tensors on {tensor.device}"
    if tensor.dtype == torch.bfloat16:
        return "Triton's interpreter computes no bfloat16 products; use float32 or float16"
    return None


def interpreting() -> bool:
    """Whether Triton's interpreter is asked for."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_not_on(index: int) -> str | None:
    found = torch.cuda.get_device_capability(index)
    if found >= OLDEST_CAPABILITY:
        return assembler.prepare(found)
    return f"the triton backend needs compute capability {OLDEST_CAPABILITY}, device {index} has {found}"
