"""Attention by the square of a polynomial in blocks of rows and keys: quadratic time, linear memory, both directions.

Two things differ from a pure power. A score of zero has the weight a_0^2, so what is masked or later must be hidden
among the weights, not among the scores. And no factor can be moved from the denominator into the queries: instead the
coefficients of a row are divided by the square root of its denominator, so that its weights lie between 0 and 1.

The denominator is the numerator of a value of one, so values carry a column of ones, which is zero where masked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.polynomial.blockwise import empty_like_inputs, empty_outputs, visible_pairs
from polysketch.ops.polynomial.reference import real_tokens, reciprocal
from polysketch.ops.polynomial.tiling import Tile, tiles


def blockwise_squared_polynomial_attention(
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
    """The reference's function, without its matrix of weights; see there for the arguments.

    Keeps the inputs, the output and one denominator a row for the backward pass, which recomputes the weights block
    by block. Differentiable once, in the coefficients too.
    """
    output, _ = _forward(query, key, value, key_mask, coefficients, offset, first_position, block_size)
    return output.to(value.dtype)


@custom_op("polysketch::squared_polynomial_attention")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    coefficients: Tensor,
    offset: float,
    first_position: int | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, query_length, value_dim) and denominator (batch, heads, query_length), working dtype."""
    output, denominator = empty_outputs(query, key, value)
    with without_autocast(query.device.type):
        terms = coefficients.to(output.dtype).unbind()
        for tile in tiles(query, key, value, first_position, block_size, num_buffers=2):
            keys, values = tile.read_keys(key, key_mask), _values_and_ones(tile, value, key_mask)
            for rows in tile.row_blocks():
                queries = tile.read_rows(query, rows)
                sums = queries.new_zeros(*queries.shape[:2], values.shape[2])
                for columns in tile.key_blocks(rows):
                    scores = torch.bmm(queries, keys[:, columns].mT, out=tile.buffer(0, queries, columns))
                    weights = polynomial(scores, terms, out=tile.buffer(1, queries, columns))
                    sums.baddbmm_(tile.hide_future_(weights.mul_(weights), rows, columns), values[:, columns])
                total = sums[..., -1:] + offset
                tile.write_rows(output, rows, sums[..., :-1] * reciprocal(total))
                tile.write_rows(denominator.unsqueeze(-1), rows, total)
    return output, denominator


@custom_op("polysketch::squared_polynomial_attention_backward")
def _backward(
    grad_output: Tensor,
    row_term: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    denominator: Tensor,
    coefficients: Tensor,
    first_position: int | None,
    block_size: int,
    with_coefficients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, if asked for, coefficients (else zeros).

    With w = p(s)^2 the loss changes with s_ij by 2 p(s_ij) p'(s_ij) g_ij, and with a_r by the sum of 2 p(s_ij) s_ij^r
    g_ij, g_ij = (grad_output_i . v_j - row_term_i) / denominator_i. p and p' are both taken divided by the root of the
    denominator.
    """
    grad_query, grad_key, grad_value = empty_like_inputs(query, key, value)
    moments = torch.zeros(coefficients.shape, dtype=torch.float64, device=query.device)
    with without_autocast(query.device.type):
        shrink = reciprocal(denominator).sqrt().unsqueeze(-1)
        terms = coefficients.to(denominator.dtype).unbind()
        upstream = torch.cat([grad_output.to(denominator.dtype), -row_term.unsqueeze(-1)], -1)
        for tile in tiles(query, key, value, first_position, block_size, num_buffers=4):
            keys, values = tile.read_keys(key, key_mask), _values_and_ones(tile, value, key_mask)
            grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in tile.row_blocks():
                queries, upstreams = tile.read_rows(query, rows), tile.read_rows(upstream, rows)
                factor = tile.read_rows(shrink, rows)
                shrunk = [term * factor for term in terms]
                slopes = [degree * term for degree, term in enumerate(shrunk)][1:]
                grad_queries = torch.zeros_like(queries)
                for columns in tile.key_blocks(rows):
                    scores = torch.bmm(queries, keys[:, columns].mT, out=tile.buffer(0, queries, columns))
                    roots = polynomial(scores, shrunk, out=tile.buffer(1, queries, columns))
                    slope = polynomial(scores, slopes, out=tile.buffer(2, queries, columns))
                    spare = tile.buffer(3, queries, columns)
                    tile.hide_future_(roots, rows, columns)
                    grad_values[:, columns].baddbmm_(torch.mul(roots, roots, out=spare).mT, upstreams)
                    roots.mul_(torch.bmm(upstreams, values[:, columns].mT, out=spare))
                    slope.mul_(roots)
                    grad_queries.baddbmm_(slope, keys[:, columns], alpha=2.0)
                    grad_keys[:, columns].baddbmm_(slope.mT, queries, alpha=2.0)
                    if with_coefficients:
                        _add_moments_(moments, roots.mul_(factor), scores)
                tile.write_rows(grad_query, rows, grad_queries)
            tile.write_keys(grad_key, grad_keys)
            tile.write_keys(grad_value, grad_values[..., :-1])
    grad_coefficients = (2 * moments).to(coefficients.dtype)
    return grad_query, grad_key, real_tokens(grad_value, key_mask), grad_coefficients


def polynomial(scores: Tensor, terms: Sequence[Tensor], out: Tensor) -> Tensor:
    """terms[0] + terms[1] * s + terms[2] * s^2 + ... of every score, by Horner's rule, written to ``out``.

    Args:
        scores: (P, R, K).
        terms: coefficients, each one number or (P, R, 1).
        out: (P, R, K), not ``scores``.
    """
    out.copy_(terms[-1].expand_as(out))
    for term in reversed(terms[:-1]):
        out.mul_(scores).add_(term)
    return out


def _values_and_ones(tile: Tile, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """(P, key_length, value_dim + 1): values and a column of ones, all of it zero where masked."""
    ones = value.new_ones(()).expand(*value.shape[:3], 1)
    return torch.cat([tile.read_keys(value, key_mask), tile.read_keys(ones, key_mask)], -1)


def _add_moments_(moments: Tensor, weights: Tensor, scores: Tensor) -> None:
    """Add the sums of weights * s^r; overwrites the weights."""
    for power in range(len(moments)):
        moments[power] += weights.sum(dtype=moments.dtype)
        weights.mul_(scores)


@_forward.register_fake
def _(query, key, value, key_mask, coefficients, offset, first_position, block_size):
    return empty_outputs(query, key, value)


@_backward.register_fake
def _(
    grad_output, row_term, query, key, value, key_mask, denominator, coefficients, first_position, block_size,
    with_coefficients,
):  # fmt: skip
    return *empty_like_inputs(query, key, value), coefficients.new_empty(coefficients.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    query, key, value, key_mask, coefficients, _, ctx.first_position, ctx.block_size = inputs
    ctx.save_for_backward(query, key, value, key_mask, coefficients, *output)


def _differentiate(ctx, grad_output: Tensor, grad_denominator: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, key_mask, coefficients, output, denominator = ctx.saved_tensors
    # What a row's normalisation takes back from every one of its weights; 0 for a row that has none.
    row_term = (grad_output * output).sum(dim=-1) - grad_denominator * denominator
    inputs = (query, key, value, key_mask, denominator, coefficients, ctx.first_position, ctx.block_size)
    *grads, grad_coefficients = _backward(grad_output, row_term, *inputs, ctx.needs_input_grad[4])
    return *grads, None, grad_coefficients, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


@counts_operations_of(torch.ops.polysketch.squared_polynomial_attention)
def _forward_flops(
    query_shape,
    key_shape,
    value_shape,
    mask_shape,
    coefficients_shape,
    offset,
    first_position,
    block_size,
    *,
    out_shape=None,
) -> int:
    """Two products over the visible pairs; a multiply-add counts as two operations."""
    return 2 * visible_pairs(query_shape, key_shape, first_position, block_size) * (query_shape[3] + value_shape[3])


@counts_operations_of(torch.ops.polysketch.squared_polynomial_attention_backward)
def _backward_flops(
    grad_shape, term_shape, query_shape, key_shape, value_shape, mask_shape, denominator_shape, coefficients_shape,
    first_position, block_size, with_coefficients, *, out_shape=None,
) -> int:  # fmt: skip
    """Five products over the visible pairs: the scores again, and one for each factor of the two forward products."""
    return (
        2
        * visible_pairs(query_shape, key_shape, first_position, block_size)
        * (3 * query_shape[3] + 2 * value_shape[3])
    )
