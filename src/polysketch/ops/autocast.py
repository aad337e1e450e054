"""Autocast kept out of what must be computed in the dtypes that are given."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A block in which autocast is off.

    Where it is off already nothing is entered: PyTorch's own context takes as long as an operation on one token, and a
    layer would enter several of them for each.

    Args:
        device_type: of the tensors, `tensor.device.type`.
    """
    if device_type == "meta":  # which has no autocast
        return contextlib.nullcontext()
    if torch.is_autocast_enabled(device_type) or torch.compiler.is_exporting():
        return torch.autocast(device_type, enabled=False)  # an exported graph may be run under autocast
    return contextlib.nullcontext()
