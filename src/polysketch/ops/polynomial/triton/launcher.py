"""Polynomial attention by Triton programs: quadratic time, linear memory, forward and backward.

Both directions are ``torch.library`` operators, ``polysketch::polynomial_attention_triton`` and its ``_backward``. They
are not those of the blockwise backend, for what is kept differs: that one returns its output in float32, this one in
the dtype of its inputs, and, where a gradient is wanted, what it lost when it was rounded. Half the bytes of a float32
output are then moved, and the backward pass subtracts as exactly (see the programs).
"""

import math
from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.custom_op import custom_op
from polysketch.ops.mass import is_none
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.polynomial.blockwise import visible_pairs

WIDEST = 128
"""Largest head_dim and value_dim: wider blocks do not fit the registers."""


def triton_polynomial_attention(
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
    """The reference's function; see there for the arguments.

    Keeps the inputs, the output, its rounding and one denominator a row for the backward pass, which computes the
    weights again. Differentiable once.

    Raises:
        RuntimeError: a block of more than one token.
    """
    if block_size > 1:
        raise RuntimeError(f"the triton backend has no blocks, got block_size={block_size}; 'blockwise' has")
    tensors = (query, key, value)
    keep_rounding = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    inputs = (tensor.to(_shared_dtype(*tensors)) for tensor in tensors)
    output, *_ = _forward(*inputs, key_mask, degree, scale, offset, first_position, keep_rounding)
    return output.to(value.dtype)


def why_not(query: Tensor, key: Tensor, value: Tensor | None = None) -> str | None:
    """Why the programs cannot take a call; None where they can. A value that is not given is as wide as the key."""
    tensors = [tensor for tensor in (query, key, value) if tensor is not None]
    for tensor in tensors:
        reason = triton.why_not(tensor)
        if reason is not None:
            return reason
    widest = max(tensor.shape[-1] for tensor in tensors)
    if widest > WIDEST:
        return f"the triton backend takes vectors of up to {WIDEST}, got one of {widest}"
    return None


def _shared_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    """That of the products: inputs that differ, as under autocast, meet in the wider one."""
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)


@custom_op("polysketch::polynomial_attention_triton")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    degree: int,
    scale: float,
    offset: float,
    first_position: int | None,
    keep_rounding: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (batch, heads, query_length, value_dim), what it lost in rounding, denominator without value_dim.

    The rounding is empty unless it is kept and the dtype is a half one. Only the output is differentiable.
    """
    from polysketch.ops.polynomial.triton.programs.forward import polynomial_forward

    output, rounding, denominator = _empty_outputs(query, value, keep_rounding)
    query, key, value = (_last_stride_one(tensor) for tensor in (query, key, value))
    constants = _constants("polynomial_forward", query, key, value, degree, first_position)
    triton.launch(
        polynomial_forward,
        _blocks(query, constants["configuration"]["ROWS"]),
        *(query, key, value, _contiguous(key_mask)),
        *(output, rounding if rounding.numel() else None, denominator),
        *_strides(query, key, value),
        *(query.shape[2], key.shape[2], first_position or 0, scale, offset),
        SCALE_QUERY=_multiplies_exactly(scale, query.dtype),
        **constants,
    )
    return output, rounding, denominator


@custom_op("polysketch::polynomial_attention_triton_backward")
def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    output: Tensor,
    rounding: Tensor,
    denominator: Tensor,
    degree: int,
    scale: float,
    first_position: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    from polysketch.ops.polynomial.triton.programs.backward import polynomial_grad_key_value, polynomial_grad_query

    grads = _empty_like(query, key, value)
    inputs = query, key, value, grad_output = [_last_stride_one(t) for t in (query, key, value, grad_output)]
    key_mask, factor = _contiguous(key_mask), _factor(denominator, degree, scale)
    pairs = denominator.new_empty(*denominator.shape, 2)
    numbers = (*_strides(*inputs), query.shape[2], key.shape[2], first_position or 0)
    constants = _constants("polynomial_grad_query", query, key, value, degree, first_position)
    triton.launch(
        polynomial_grad_query,
        _blocks(query, constants["configuration"]["ROWS"]),
        *(query, key, value, key_mask, output, rounding if rounding.numel() else None, grad_output, factor),
        *(grads[0], pairs, *numbers),
        **constants,
    )
    constants = _constants("polynomial_grad_key_value", query, key, value, degree, first_position)
    triton.launch(
        polynomial_grad_key_value,
        _blocks(key, constants["configuration"]["KEYS"]),
        *(query, key, value, key_mask, grad_output, pairs, grads[1], grads[2], *numbers),
        **constants,
    )
    return grads


def _factor(denominator: Tensor, degree: int, scale: float) -> Tensor:
    """scale / denominator^(1 / degree), which makes a power of a score a share of its row; by way of float64.

    0 for a row without mass, NaN for one whose sum overflowed: as its output is.
    """
    factor = scale * denominator.double().pow(-1.0 / degree)
    return factor.masked_fill(is_none(denominator), 0.0).masked_fill(denominator.isinf(), math.nan).float()


def _constants(
    program: str, query: Tensor, key: Tensor, value: Tensor, degree: int, first_position: int | None
) -> dict[str, Any]:
    """What a program is compiled for."""
    import triton as compiler
    import triton.language as tl

    head, width = (max(16, compiler.next_power_of_2(tensor.shape[3])) for tensor in (query, value))
    dtype = str(query.dtype).removeprefix("torch.")
    precision = triton.precision(query.dtype)
    return {
        "configuration": triton.configuration(
            program, query.device, dtype=dtype, precision=precision, size=max(head, width)
        ),
        "KEY_HEADS": key.shape[1],
        "SHARED": query.shape[1] // key.shape[1],
        "HEAD": query.shape[3],
        "WIDTH": value.shape[3],
        "HEAD_BLOCK": head,
        "WIDTH_BLOCK": width,
        "DEGREE": degree,
        "CAUSAL": first_position is not None,
        "PRECISION": precision,
        "DOT": tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float32,
    }


def _multiplies_exactly(scale: float, dtype: torch.dtype) -> bool:
    """Whether queries may be multiplied instead of scores: in float32, or by a power of two where none gets too small.

    In float16, which has few exponents, some could.
    """
    return dtype == torch.float32 or (dtype == torch.bfloat16 and abs(math.frexp(scale)[0]) in (0.0, 0.5))


def _blocks(tensor: Tensor, size: int) -> int:
    """Blocks of `size` tokens in all heads of (batch, heads, length, width)."""
    return tensor.shape[0] * tensor.shape[1] * -(-tensor.shape[2] // size)


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and token of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _last_stride_one(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _contiguous(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.contiguous()


def _empty_outputs(query: Tensor, value: Tensor, keep_rounding: bool) -> tuple[Tensor, Tensor, Tensor]:
    output = query.new_empty(*query.shape[:3], value.shape[3])
    keep_rounding = keep_rounding and output.dtype != torch.float32
    rounding = torch.empty_like(output) if keep_rounding else query.new_empty(0)
    return output, rounding, query.new_empty(query.shape[:3], dtype=torch.float32)


def _empty_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous, whatever the strides of the inputs."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@_forward.register_fake
def _(query, key, value, key_mask, degree, scale, offset, first_position, keep_rounding):
    return _empty_outputs(query, value, keep_rounding)


@_backward.register_fake
def _(grad_output, query, key, value, *rest):
    return _empty_like(query, key, value)


def _save_for_backward(ctx, inputs, output) -> None:
    query, key, value, key_mask, ctx.degree, ctx.scale, _, ctx.first_position, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, key, value, key_mask, *output)


def _differentiate(ctx, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad_output, *ctx.saved_tensors, ctx.degree, ctx.scale, ctx.first_position)
    return *grads, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


@counts_operations_of(torch.ops.polysketch.polynomial_attention_triton)
def _forward_flops(
    query_shape, key_shape, value_shape, mask_shape, degree, scale, offset, first_position, *rest, out_shape=None
) -> int:
    """Two products over the visible pairs; a multiply-add counts as two operations."""
    return 2 * visible_pairs(query_shape, key_shape, first_position) * (query_shape[3] + value_shape[3])


@counts_operations_of(torch.ops.polysketch.polynomial_attention_triton_backward)
def _backward_flops(
    grad_shape, query_shape, key_shape, value_shape, mask_shape, output_shape, rounding_shape, denominator_shape,
    degree, scale, first_position, *, out_shape=None,
) -> int:  # fmt: skip
    """Five products over the visible pairs, as in every backend; two of them are done twice here."""
    return 2 * visible_pairs(query_shape, key_shape, first_position) * (3 * query_shape[3] + 2 * value_shape[3])
