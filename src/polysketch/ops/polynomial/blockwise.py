"""Polynomial attention in blocks of rows and keys: quadratic time, linear memory, forward and backward.

No running maximum is needed, unlike softmax: a row's numerator and sum of weights just add up over its blocks of
keys. Both directions are ``torch.library`` operators, ``polysketch::polynomial_attention`` and its ``_backward``.
"""

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.polynomial.reference import reciprocal, working_dtype
from polysketch.ops.polynomial.tiling import tiles


def blockwise_polynomial_attention(
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
    """The reference's function, without its matrix of weights; see there for the arguments.

    Keeps the inputs, the output and one denominator a row for the backward pass, which recomputes the weights block
    by block. Differentiable once.
    """
    output, _ = _forward(query, key, value, key_mask, degree, scale, offset, first_position, block_size)
    return output.to(value.dtype)


@custom_op("polysketch::polynomial_attention")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    degree: int,
    scale: float,
    offset: float,
    first_position: int | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, query_length, value_dim) and denominator (batch, heads, query_length).

    Both in the working dtype: the backward pass subtracts from each grad_output_i . v_j its mean over the row, which
    nearly cancels where one weight holds most of the mass, so an output rounded to half precision would not do.
    """
    output, denominator = empty_outputs(query, key, value)
    with without_autocast(query.device.type):
        for tile in tiles(query, key, value, first_position, block_size, num_buffers=1):
            keys, values = tile.read_keys(key, key_mask), tile.read_keys(value, key_mask)
            for rows in tile.row_blocks():
                queries = tile.read_rows(query, rows) * scale
                numerator = queries.new_zeros(*queries.shape[:2], values.shape[2])
                total = queries.new_full((*queries.shape[:2], 1), offset)
                for columns in tile.key_blocks(rows):
                    weights = torch.bmm(queries, keys[:, columns].mT, out=tile.buffer(0, queries, columns))
                    power_(tile.hide_future_(weights, rows, columns), degree)
                    total += weights.sum(dim=-1, keepdim=True)
                    numerator.baddbmm_(weights, values[:, columns])
                tile.write_rows(output, rows, numerator.mul_(reciprocal(total)))
                tile.write_rows(denominator.unsqueeze(-1), rows, total)
    return output, denominator


@custom_op("polysketch::polynomial_attention_backward")
def _backward(
    grad_output: Tensor,
    row_term: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    denominator: Tensor,
    degree: int,
    scale: float,
    first_position: int | None,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    With the weight w = s^degree of a score s, the loss changes with s_ij by
    degree * s_ij^(degree - 1) * (grad_output_i . v_j - row_term_i) / denominator_i. Each query is first divided by
    about denominator_i^(1 / degree), so that no power overflows and no gradient is lost by a huge denominator.
    """
    grad_query, grad_key, grad_value = empty_like_inputs(query, key, value)
    with without_autocast(query.device.type):
        shrink, remainder = (factor.unsqueeze(-1) for factor in _split_reciprocal(denominator, degree))
        for tile in tiles(query, key, value, first_position, block_size, num_buffers=2):
            keys, values = tile.read_keys(key, key_mask), tile.read_keys(value, key_mask)
            grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in tile.row_blocks():
                factor, divisor = tile.read_rows(shrink, rows) * scale, tile.read_rows(remainder, rows)
                queries = tile.read_rows(query, rows) * factor
                upstream = tile.read_rows(grad_output, rows) * divisor
                term = tile.read_rows(row_term.unsqueeze(-1), rows) * divisor
                grad_queries = torch.zeros_like(queries)
                for columns in tile.key_blocks(rows):
                    scores = torch.bmm(queries, keys[:, columns].mT, out=tile.buffer(0, queries, columns))
                    tile.hide_future_(scores, rows, columns)
                    slope = odd_power(scores, degree - 1, out=tile.buffer(1, queries, columns))
                    grad_values[:, columns].baddbmm_(scores.mul_(slope).mT, upstream)
                    grad_weights = torch.bmm(upstream, values[:, columns].mT, out=scores)
                    slope.mul_(grad_weights.sub_(term))
                    grad_queries.baddbmm_(slope, keys[:, columns])
                    grad_keys[:, columns].baddbmm_(slope.mT, queries)
                tile.write_rows(grad_query, rows, grad_queries.mul_(factor * degree))
            tile.write_keys(grad_key, grad_keys.mul_(degree))
            tile.write_keys(grad_value, grad_values)
    return grad_query, grad_key, grad_value


def power_(base: Tensor, exponent: int) -> Tensor:
    """base^exponent in place, by squaring; no other memory when the exponent is a power of two."""
    while exponent % 2 == 0:
        base.mul_(base)
        exponent //= 2
    if exponent > 1:
        base.copy_(odd_power(base, exponent, out=torch.empty_like(base)))
    return base


def odd_power(base: Tensor, exponent: int, out: Tensor) -> Tensor:
    """base^exponent for an odd exponent, written to ``out``: square, and multiply where the exponent has a bit."""
    if exponent == 1:
        return out.copy_(base)
    bits = f"{exponent:b}"[1:]
    torch.mul(base, base, out=out)
    for position, bit in enumerate(bits):
        if position > 0:
            out.mul_(out)
        if bit == "1":
            out.mul_(base)
    return out


def _split_reciprocal(denominator: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """1 / denominator as shrink^degree * remainder: shrink a power of two, so that it rounds nothing.

    The remainder lies between 2^(1 - degree) and 2, or is 0 for a denominator of 0 and NaN for one that overflowed.
    """
    mantissa, exponent = torch.frexp(denominator)
    shrink_exponent = torch.div(exponent, degree, rounding_mode="floor")
    rest = torch.ldexp(mantissa, exponent - degree * shrink_exponent)
    return torch.ldexp(torch.ones_like(rest), -shrink_exponent), reciprocal(rest)


def empty_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output and the denominators, in the working dtype."""
    rows, dtype = query.shape[:3], working_dtype(query, key, value)
    return value.new_empty((*rows, value.shape[3]), dtype=dtype), query.new_empty(rows, dtype=dtype)


def empty_like_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous, whatever the strides of the inputs, so that the fake kernel need not know those."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


@_forward.register_fake
def _(query, key, value, key_mask, degree, scale, offset, first_position, block_size):
    return empty_outputs(query, key, value)


@_backward.register_fake
def _(grad_output, row_term, query, key, value, key_mask, denominator, degree, scale, first_position, block_size):
    return empty_like_inputs(query, key, value)


def _save_for_backward(ctx, inputs, output) -> None:
    query, key, value, key_mask, ctx.degree, ctx.scale, _, ctx.first_position, ctx.block_size = inputs
    ctx.save_for_backward(query, key, value, key_mask, *output)


def _differentiate(ctx, grad_output: Tensor, grad_denominator: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, key_mask, output, denominator = ctx.saved_tensors
    # What a row's normalisation takes back from every one of its weights; 0 for a row that has none.
    row_term = (grad_output * output).sum(dim=-1) - grad_denominator * denominator
    grads = _backward(
        grad_output,
        row_term,
        query,
        key,
        value,
        key_mask,
        denominator,
        ctx.degree,
        ctx.scale,
        ctx.first_position,
        ctx.block_size,
    )
    return *grads, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def visible_pairs(
    query_shape: tuple[int, ...], key_shape: tuple[int, ...], first_position: int | None, block_size: int = 1
) -> int:
    """Pairs of a query and a key that it sees, over all heads of the batch."""
    batch, heads, rows, _ = query_shape
    keys = key_shape[2]
    if first_position is None:
        return batch * heads * rows * keys
    whole, rest = divmod(rows, min(block_size, rows))
    later = (whole * min(block_size, rows) * (min(block_size, rows) - 1) + rest * (rest - 1)) // 2  # of their own block
    return batch * heads * (rows * (first_position + 1) + rows * (rows - 1) // 2 + later)


@counts_operations_of(torch.ops.polysketch.polynomial_attention)
def _forward_flops(
    query_shape,
    key_shape,
    value_shape,
    mask_shape,
    degree,
    scale,
    offset,
    first_position,
    block_size,
    *,
    out_shape=None,
) -> int:
    """Two products over the visible pairs; a multiply-add counts as two operations."""
    return 2 * visible_pairs(query_shape, key_shape, first_position, block_size) * (query_shape[3] + value_shape[3])


@counts_operations_of(torch.ops.polysketch.polynomial_attention_backward)
def _backward_flops(
    grad_shape, term_shape, query_shape, key_shape, value_shape, mask_shape, denominator_shape, degree, scale,
    first_position, block_size, *, out_shape=None,
) -> int:  # fmt: skip
    """Five products over the visible pairs: the scores again, and one for each factor of the two forward products."""
    return (
        2
        * visible_pairs(query_shape, key_shape, first_position, block_size)
        * (3 * query_shape[3] + 2 * value_shape[3])
    )
