"""Polynomial attention by its definition: quadratic, plain PyTorch, the oracle of every other backend."""

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.blocks import hide_later
from polysketch.ops.mass import is_none


def reference_polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int,
    scale: float,
    offset: float,
    first_position: int | None,
    key_mask: Tensor | None,
    block_size: int = 1,
) -> Tensor:
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij) with w_ij = (scale * q_i . k_j)^degree, all weights at once.

    Args:
        query: (batch, heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        degree: even, at least 2.
        scale: factor on q . k.
        offset: added to the sum of weights.
        first_position: query i sees the keys j <= first_position + i; None: every query sees every key.
        key_mask: (batch, key_length) bool, True for a real token.
        block_size: query i sees the keys through the end of its block of so many, counted from the first query.

    Returns:
        (batch, heads, query_length, value_dim) in the dtype of ``value``, computed in float32 or float64.

    Memory: query_length * key_length numbers a head, several times over when gradients are wanted.
    """
    with without_autocast(query.device.type):
        dtype = working_dtype(query, key, value)
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = real_tokens(key.to(dtype), key_mask), real_tokens(value.to(dtype), key_mask)
        wide_key, wide_value = (tensor.repeat_interleave(groups, dim=1) for tensor in (wide_key, wide_value))
        weights = (query.to(dtype) * scale @ wide_key.transpose(-1, -2)).pow(degree)
        if first_position is not None:
            weights = hide_later(weights, first_position, block_size)
        output = (weights @ wide_value) * reciprocal(offset + weights.sum(dim=-1, keepdim=True))
        return output.to(value.dtype)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Dtype of weights and sums: float64 when an input is float64, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def real_tokens(tensor: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the padded positions of a key or value (batch, heads, length, width).

    A zero key has the weight 0^degree = 0, exactly, and nothing that stands in the padding, NaN included, gets out.
    """
    return tensor if key_mask is None else tensor.masked_fill(~key_mask[:, None, :, None], 0.0)


def reciprocal(denominator: Tensor) -> Tensor:
    """1 / denominator, but 0 where there is no weight, and NaN where it overflowed.

    A finite numerator over an infinite denominator would be a wrong zero in silence.
    """
    denominator = denominator.masked_fill(denominator.isinf(), torch.nan)
    empty = is_none(denominator)
    return torch.where(empty, 0.0, 1.0 / denominator.masked_fill(empty, 1.0))
