"""Attention by the square of a polynomial, by its definition: quadratic, plain PyTorch, the other backend's oracle."""

from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.blocks import hide_later
from polysketch.ops.polynomial.reference import real_tokens, reciprocal, working_dtype


def reference_squared_polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Tensor,
    *,
    offset: float,
    first_position: int | None,
    key_mask: Tensor | None,
    block_size: int = 1,
) -> Tensor:
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij), w_ij = (a_0 + a_1 s + ... + a_D s^D)^2, s = q_i . k_j.

    Args:
        query: (batch, heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        coefficients: (D + 1,), a_0 first.
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
        weights = _polynomial(query.to(dtype) @ wide_key.transpose(-1, -2), coefficients.to(dtype)).square()
        if key_mask is not None:  # a masked key is zero, but its weight would be a_0^2
            weights = weights.masked_fill(~key_mask[:, None, None, :], 0.0)
        if first_position is not None:
            weights = hide_later(weights, first_position, block_size)
        output = (weights @ wide_value) * reciprocal(offset + weights.sum(dim=-1, keepdim=True))
        return output.to(value.dtype)


def _polynomial(scores: Tensor, coefficients: Tensor) -> Tensor:
    """a_0 + a_1 s + ... of every score, by Horner's rule."""
    result = coefficients[-1].expand_as(scores)
    for coefficient in coefficients[:-1].flip(0):
        result = result * scores + coefficient
    return result
