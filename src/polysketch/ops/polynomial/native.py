"""The native backend: exact weights of polynomials by a program in C++ (`ops/native/source`), on a CPU.

It computes in float32, of half precision too; 32 queries at a time look at 128 keys. Powers and squares of polynomials
are one program, and one `torch.library` operator with its backward: `polysketch::polynomial_attention_native`.
"""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.native import TensorPointer, library
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.native.pairs import PAIRS_FIELDS, QUERIES, Pairs, PairsArguments
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.parallel import num_workers
from polysketch.ops.polynomial.blockwise import visible_pairs

_OUTPUTS = ("output", "denominator")
_GRADIENTS = ("output_gradient", "row_term", "query_gradient", "key_gradient", "value_gradient")
LARGEST_DEGREE = 60
"""Of a power: backward a denominator is divided up to a number of as many bits, and float32 has 126."""
_FEWEST_QUERIES = 4 * QUERIES  # of a span: those at its ends look at keys that fewer queries see


class _Call(ctypes.Structure):
    """`PolynomialAttentionCall` of polynomial_attention.h."""

    _fields_ = (
        *PAIRS_FIELDS,
        ("degree", ctypes.c_int64),
        ("terms", ctypes.c_int64),
        ("coefficients", ctypes.c_void_p),
        ("offset", ctypes.c_float),
        *((name, TensorPointer) for name in (*_OUTPUTS, *_GRADIENTS)),
        ("moments", ctypes.c_void_p),
    )


def why_not(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    return why_no_program(query) or why_no_program(key) or why_no_program(value)


def native_polynomial_attention(
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
    """The reference's function; see there for the arguments. Differentiable once."""
    weights = (None, degree, scale, offset, first_position, block_size)
    return _forward(query, key, value, key_mask, *weights)[0].to(value.dtype)


def native_squared_polynomial_attention(
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
    """As the reference of squared polynomials. Differentiable once, in the coefficients too."""
    weights = (coefficients, 0, 1.0, offset, first_position, block_size)
    return _forward(query, key, value, key_mask, *weights)[0].to(value.dtype)


class _Options(NamedTuple):
    """What the operator is given besides tensors."""

    degree: int
    scale: float
    offset: float
    first_position: int | None
    block_size: int


@custom_op("polysketch::polynomial_attention_native")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    coefficients: Tensor | None,
    degree: int,
    scale: float,
    offset: float,
    first_position: int | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, query_length, value_dim) and denominator (batch, heads, query_length), in float32."""
    output, denominator = _empty_outputs(query, value)
    options = _Options(degree, scale, offset, first_position, block_size)
    call = _arguments(query, key, value, key_mask, coefficients, options)
    call.rows(output=output, denominator=denominator)
    call.run(library().polynomial_attention_forward)
    return output, denominator


@custom_op("polysketch::polynomial_attention_native_backward")
def _backward(
    grad_output: Tensor,
    row_term: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    coefficients: Tensor | None,
    denominator: Tensor,
    degree: int,
    scale: float,
    first_position: int | None,
    block_size: int,
    with_coefficients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, where asked for, of the coefficients, else nothing."""
    options = _Options(degree, scale, 0.0, first_position, block_size)
    call = _arguments(query, key, value, key_mask, coefficients, options)
    empty = torch.zeros if query.shape[2] == 0 else torch.empty  # without queries the program writes nothing
    grads = [empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
    call.rows(denominator=denominator, output_gradient=grad_output, row_term=row_term)
    call.rows(**dict(zip(_GRADIENTS[2:], grads, strict=True)))
    moments = None
    if with_coefficients and coefficients is not None:
        moments = query.new_zeros((call.units, len(coefficients)), dtype=torch.float64)
        call.point("moments", moments)
    call.run(library().polynomial_attention_backward)
    of_coefficients = query.new_empty(0) if moments is None else moments.sum(0)
    dtypes = (query.dtype, key.dtype, value.dtype, query.dtype if coefficients is None else coefficients.dtype)
    of_query, of_key, of_value, of_terms = (x.to(d) for x, d in zip((*grads, of_coefficients), dtypes, strict=True))
    return of_query, of_key, of_value, of_terms


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows = query.shape[:3]
    return (
        query.new_empty((*rows, value.shape[3]), dtype=torch.float32),
        query.new_empty(rows, dtype=torch.float32),
    )


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, coefficients: Tensor | None, options: _Options
) -> PairsArguments:
    """The call, in which queries stand at the end of the keys: first_position is their difference wherever it is given.

    Without one, a query sees all keys, wherever it stands.

    Raises:
        ValueError: another first_position.
    """
    last = key.shape[2] - query.shape[2]
    if options.first_position not in (None, last):
        raise ValueError(f"expected queries at the end of the keys, from {last} on, got {options.first_position}")
    behind = ahead = max(query.shape[2], key.shape[2])
    block = 0
    if options.first_position is not None:
        block = min(options.block_size, query.shape[2])
        ahead, block = block - 1, block if block > 1 else 0
    pairs = Pairs(query, key, value, key_mask, behind, ahead, block)
    call = PairsArguments(_Call, pairs, options.scale, lambda heads: _num_spans(heads, query.shape[2]))
    call.call.degree, call.call.offset = options.degree, options.offset
    if coefficients is not None:
        call.point("coefficients", coefficients.float().contiguous())
        call.call.terms = len(coefficients)
    return call


def _num_spans(heads: int, queries: int) -> int:
    """Spans of a key head, so that every thread has as many."""
    threads = num_workers(torch.device("cpu"))
    return max(1, min(threads // math.gcd(heads, threads), queries // _FEWEST_QUERIES))


@_forward.register_fake
def _(query, key, value, key_mask, coefficients, degree, scale, offset, first_position, block_size):
    return _empty_outputs(query, value)


@_backward.register_fake
def _(
    grad_output, row_term, query, key, value, key_mask, coefficients, denominator, degree, scale, first_position,
    block_size, with_coefficients,
):  # fmt: skip
    terms = coefficients is not None and with_coefficients
    of_coefficients = (query if coefficients is None else coefficients).new_empty(len(coefficients) if terms else 0)
    return *(x.new_empty(x.shape) for x in (query, key, value)), of_coefficients


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.degree, ctx.scale, _, ctx.first_position, ctx.block_size = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad_output: Tensor, grad_denominator: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, output, denominator = ctx.saved_tensors
    # What a row's normalisation takes back from every one of its weights; 0 for a row that has none.
    row_term = (grad_output * output).sum(dim=-1) - grad_denominator * denominator
    options = (ctx.degree, ctx.scale, ctx.first_position, ctx.block_size)
    *grads, of_coefficients = _backward(grad_output, row_term, *tensors, denominator, *options, ctx.needs_input_grad[4])
    terms = of_coefficients if ctx.needs_input_grad[4] else None
    return *grads, None, terms, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


@counts_operations_of(torch.ops.polysketch.polynomial_attention_native)
def _forward_flops(
    query_shape, key_shape, value_shape, mask_shape, coefficients_shape, degree, scale, offset, first_position,
    block_size, *, out_shape=None,
) -> int:  # fmt: skip
    """Two products over the visible pairs; a multiply-add counts as two operations."""
    return 2 * visible_pairs(query_shape, key_shape, first_position, block_size) * (query_shape[3] + value_shape[3])


@counts_operations_of(torch.ops.polysketch.polynomial_attention_native_backward)
def _backward_flops(
    grad_shape, term_shape, query_shape, key_shape, value_shape, mask_shape, coefficients_shape, denominator_shape,
    degree, scale, first_position, block_size, with_coefficients, *, out_shape=None,
) -> int:  # fmt: skip
    """Five products over the visible pairs: the scores again, and one for each factor of the two forward products."""
    pairs = visible_pairs(query_shape, key_shape, first_position, block_size)
    return 2 * pairs * (3 * query_shape[3] + 2 * value_shape[3])
