"""The definition, in PyTorch's operations."""

import torch.nn.functional as F
from torch import Tensor


def gated_gelu(joined: Tensor) -> Tensor:
    """gelu(gate) * up; arguments as `polysketch.ops.gated_gelu.gated_gelu`."""
    gate, up = joined.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
