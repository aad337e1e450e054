"""The computation of the learned sketch: cache-sized pieces of rows, forward and backward written out.

The hidden activations of the networks are several times the size of queries, keys and values. They are therefore
made for some rows at a time, used while they are in cache, and made again in backward. A custom operator, so that
`torch.compile` sees one node and not a loop.

Weights come as a flat list: for every map, for every network (the leaves of the recursion first, then the next
level, pairs in order), norm scale, norm bias, up, down, norm scale, norm bias, up, down.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polysketch.ops.gelu import gelu, gelu_backward
from polysketch.ops.parallel import deal, num_workers, run_in_parallel

_NORM_EPSILON = 1e-5
_TENSORS = 8  # a network
_PIECE_ROWS = {"cpu": 1024}  # tokens x heads at a time: 1 MB of hidden activations at r = 32
_PIECE_ROWS_ELSEWHERE = 65536  # enough to fill a GPU

_Part = tuple[int, tuple[slice, slice, slice]]  # which map; slices of batch, heads and length


@torch.library.custom_op("polysketch::learned_sketch", mutates_args=())
def learned_sketch(x: Tensor, weights: list[Tensor], leaves: int) -> Tensor:
    """phi(x) of Algorithm 2.

    Args:
        x: (batch, heads, length, head_dim), any strides.
        weights: see the module's text; computed with in the dtype of x.
        leaves: degree / 2, the number of networks that take x.

    Returns:
        (batch, heads, length, sketch_size), dtype of x.
    """
    with torch.autocast(x.device.type, enabled=False):
        features = _empty_features(x, weights)
        maps = _maps(weights, leaves, x.dtype)

        def work(share: Sequence[_Part]) -> None:
            for index, part in share:
                rows = x[part]
                features[part] = _sketch(rows.reshape(-1, rows.shape[-1]), maps[index]).view(*rows.shape[:-1], -1)

        run_in_parallel(work, _shares(x, len(maps)))
        return features


@torch.library.custom_op("polysketch::learned_sketch_backward", mutates_args=())
def learned_sketch_backward(grad: Tensor, x: Tensor, weights: list[Tensor], leaves: int) -> list[Tensor]:
    """Gradients of x and of every weight; the weights' are summed in the weights' own dtype."""
    with torch.autocast(x.device.type, enabled=False):
        grad_x = torch.empty_like(x)
        maps = _maps(weights, leaves, x.dtype)
        shares = _shares(x, len(maps))
        # Each thread sums gradients of its own, added in order: the same result whichever thread is first.
        grad_weights = [[torch.zeros_like(weight) for weight in weights] for _ in shares]

        def work(share: Sequence[tuple[int, _Part]]) -> None:
            for thread, (index, part) in share:
                rows, tape = x[part], list[Any]()
                _sketch(rows.reshape(-1, rows.shape[-1]), maps[index], tape)
                totals = _group(grad_weights[thread], leaves)[index]
                grad_rows = grad[part].reshape(-1, grad.shape[-1])
                grad_x[part] = _sketch_backward(grad_rows, maps[index], totals, tape).view(rows.shape)

        run_in_parallel(work, [[(thread, part) for part in share] for thread, share in enumerate(shares)])
        return [grad_x, *(torch.stack(parts).sum(0) for parts in zip(*grad_weights, strict=True))]


@learned_sketch.register_fake
def _(x: Tensor, weights: list[Tensor], leaves: int) -> Tensor:
    return _empty_features(x, weights)


@learned_sketch_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], leaves: int) -> list[Tensor]:
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, ctx.leaves = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None]:
    x, *weights = ctx.saved_tensors
    grad_x, *grad_weights = learned_sketch_backward(grad, x, weights, ctx.leaves)
    return grad_x, grad_weights, None


learned_sketch.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.polysketch.learned_sketch)
def _forward_flops(x_shape: tuple, weight_shapes: list[tuple], leaves: int, **_: Any) -> int:
    batch, heads, length, _width = x_shape
    maps = len(weight_shapes) // (_TENSORS * (2 * leaves - 2))
    products = sum(shape[0] * shape[1] for shape in weight_shapes if len(shape) == 2)
    return 2 * batch * heads * length * products // maps


@register_flop_formula(torch.ops.polysketch.learned_sketch_backward)
def _backward_flops(_grad: tuple, x_shape: tuple, weight_shapes: list[tuple], leaves: int, **_: Any) -> int:
    return 3 * _forward_flops(x_shape, weight_shapes, leaves)  # the recomputation, and two products for each


class _Network(NamedTuple):
    input_scale: Tensor
    input_bias: Tensor
    input_up: Tensor
    input_down: Tensor
    middle_scale: Tensor
    middle_bias: Tensor
    middle_up: Tensor
    middle_down: Tensor


class _Activations(NamedTuple):
    """What the backward pass of one network needs: normed inputs, hidden before and after the GELU, norm statistics."""

    rows: Tensor
    input_stats: tuple[Tensor, Tensor]
    normed: Tensor
    input_hidden: Tensor
    input_active: Tensor
    middle: Tensor
    middle_stats: tuple[Tensor, Tensor]
    middle_normed: Tensor
    middle_hidden: Tensor
    middle_active: Tensor
    output: Tensor


def _empty_features(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[0])


def _maps(weights: list[Tensor], leaves: int, dtype: torch.dtype) -> list[list[_Network]]:
    return _group([weight.to(dtype) for weight in weights], leaves)


def _group(tensors: list[Tensor], leaves: int) -> list[list[_Network]]:
    """The flat list as networks of each map."""
    networks = [_Network(*tensors[i : i + _TENSORS]) for i in range(0, len(tensors), _TENSORS)]
    size = 2 * leaves - 2
    return [networks[i : i + size] for i in range(0, len(networks), size)]


def _shares(x: Tensor, num_maps: int) -> list[Sequence[_Part]]:
    """The pieces of each thread."""
    return deal(list(_pieces(x, num_maps)), num_workers(x.device))


def _pieces(x: Tensor, num_maps: int) -> Iterator[_Part]:
    """Map index and (batch, heads, length) slices of at most a piece of rows, whole heads of one map each."""
    batch, heads, length, _ = x.shape
    group = heads // num_maps
    limit = _PIECE_ROWS.get(x.device.type, _PIECE_ROWS_ELSEWHERE)
    tokens = max(1, min(length, limit // group))
    items = max(1, limit // (group * tokens))
    for index in range(num_maps):
        of_map = slice(index * group, (index + 1) * group)
        for item in range(0, batch, items):
            for start in range(0, length, tokens):
                yield index, (slice(item, item + items), of_map, slice(start, start + tokens))


def _sketch(rows: Tensor, networks: list[_Network], tape: list | None = None) -> Tensor:
    """(m, head_dim) -> (m, r), by the recursion of Algorithm 2 from its leaves up."""
    leaves = len(networks) // 2 + 1
    values, used = [rows] * leaves, 0
    while len(values) > 1:
        level = networks[used : used + len(values)]
        outputs = [_network(value, network, tape) for value, network in zip(values, level, strict=True)]
        used += len(values)
        values = [_combine(left, right) for left, right in zip(outputs[::2], outputs[1::2], strict=True)]
        if tape is not None:
            tape.append(values)
    return values[0]


def _sketch_backward(grad: Tensor, networks: list[_Network], totals: list[_Network], tape: list) -> Tensor:
    """The gradient of the rows; adds those of the weights to `totals`. Walks the tape of `_sketch` from its end."""
    grads, first = [grad], len(networks)
    while first > 0:
        values, count = tape.pop(), 2 * len(grads)
        activations = tape[-count:]
        del tape[-count:]
        first -= count
        outputs = [activation.output for activation in activations]
        pairs = zip(grads, values, outputs[::2], outputs[1::2], strict=True)
        grad_outputs = [half for pair in pairs for half in _combine_backward(*pair)]
        grads = [
            _network_backward(grad_outputs[i], networks[first + i], totals[first + i], activations[i])
            for i in range(count)
        ]
    return torch.stack(grads).sum(0) if len(grads) > 2 else grads[0].add_(grads[1])


def _combine(left: Tensor, right: Tensor) -> Tensor:
    """sqrt(r) tanh(sqrt(1/r) left * right), in float32 or better."""
    root = left.shape[-1] ** 0.5
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide) * right).mul_(1 / root).tanh_().mul_(root).to(left.dtype)


def _combine_backward(grad: Tensor, combined: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    slope = 1 - combined * combined / combined.shape[-1]
    grad = grad * slope
    return grad * right, grad * left


def _network(rows: Tensor, network: _Network, tape: list | None) -> Tensor:
    normed, input_stats = _norm(rows, network.input_scale, network.input_bias)
    input_hidden = F.linear(normed, network.input_up)
    input_active = gelu(input_hidden)
    middle = F.linear(input_active, network.input_down)
    middle_normed, middle_stats = _norm(middle, network.middle_scale, network.middle_bias)
    middle_hidden = F.linear(middle_normed, network.middle_up)
    middle_active = gelu(middle_hidden)
    output = F.linear(middle_active, network.middle_down)
    if tape is not None:
        tape.append(
            _Activations(
                rows,
                input_stats,
                normed,
                input_hidden,
                input_active,
                middle,
                middle_stats,
                middle_normed,
                middle_hidden,
                middle_active,
                output,
            )
        )
    return output


def _network_backward(grad: Tensor, network: _Network, totals: _Network, kept: _Activations) -> Tensor:
    """The gradient of the network's input; adds those of its weights to `totals`."""
    grad = _linear_backward(grad, network.middle_down, totals.middle_down, kept.middle_active)
    grad = gelu_backward(grad, kept.middle_hidden)
    grad = _linear_backward(grad, network.middle_up, totals.middle_up, kept.middle_normed)
    grad, scale, bias = _norm_backward(grad, kept.middle, kept.middle_stats, network.middle_scale, network.middle_bias)
    totals.middle_scale.add_(scale)
    totals.middle_bias.add_(bias)
    grad = _linear_backward(grad, network.input_down, totals.input_down, kept.input_active)
    grad = gelu_backward(grad, kept.input_hidden)
    grad = _linear_backward(grad, network.input_up, totals.input_up, kept.normed)
    grad, scale, bias = _norm_backward(grad, kept.rows, kept.input_stats, network.input_scale, network.input_bias)
    totals.input_scale.add_(scale)
    totals.input_bias.add_(bias)
    return grad


def _norm(rows: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The normed rows, and each row's mean and reciprocal deviation."""
    normed, mean, reciprocal = torch.native_layer_norm(rows, rows.shape[-1:], scale, bias, _NORM_EPSILON)
    return normed, (mean, reciprocal)


def _norm_backward(
    grad: Tensor, rows: Tensor, stats: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.native_layer_norm_backward(
        grad, rows, rows.shape[-1:], *stats, scale, bias, [True, True, True]
    )


def _linear_backward(grad: Tensor, weight: Tensor, total: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of the inputs; adds grad^T inputs to `total`."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, inputs)
    else:
        total.add_(grad.T @ inputs)
    return grad @ weight
