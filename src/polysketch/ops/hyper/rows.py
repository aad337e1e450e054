"""Gathering rows of tensors by indices, fast in both directions."""

import torch
import torch.nn.functional as F
from torch import Tensor


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows of (..., n, width) at index (..., *shape): (..., *shape, width). Indices may repeat.

    As an embedding: its backward pass adds up whole rows, `gather`'s adds entry by entry.
    """
    lead, (length, width) = source.shape[:-2], source.shape[-2:]
    first = torch.arange(lead.numel(), device=source.device) * length
    flat = index.reshape(lead.numel(), -1) + first[:, None]
    return F.embedding(flat, source.reshape(-1, width)).view(*index.shape, width)
