"""The networks of the learned sketch in plain PyTorch: cache-sized pieces of rows, forward and backward written out.

The networks of one level of the recursion work side by side, as one batch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.activations import ACTIVATIONS, Activation
from polysketch.ops.learned_sketch.gradients import dtype_of_all, joined
from polysketch.ops.learned_sketch.networks import TENSORS, Networks
from polysketch.ops.parallel import deal, num_workers, run_in_parallel
from polysketch.ops.workspace import Workspace

_NORM_EPSILON = 1e-5
_PIECE_ROWS = {"cpu": 1024}  # tokens x heads at a time: 2 MB of hidden activations at r = 32
_PIECE_ROWS_ELSEWHERE = 65536  # enough to fill a GPU
_SUMMED_ROWS = 1024  # of one product in a gradient of weights

_Part = tuple[int, tuple[slice, slice, slice]]  # which map; slices of batch, heads and length


def forward(x: Tensor, weights: list[Tensor], networks: Networks) -> Tensor:
    """phi(x); arguments as in `learned_sketch`."""
    features = x.new_empty(*x.shape[:-1], weights[-1].shape[0])
    maps, activation = _maps(weights, networks, x.dtype), ACTIVATIONS[networks.activation]

    def work(share: Sequence[_Part]) -> None:
        workspace = Workspace()
        for index, part in share:
            rows = x[part]
            found = _sketch(rows.reshape(-1, rows.shape[-1]), maps[index], activation, workspace)
            features[part] = found.view(*rows.shape[:-1], -1)

    run_in_parallel(work, _shares(x, len(maps)))
    return features


def backward(grad: Tensor, x: Tensor, weights: list[Tensor], networks: Networks) -> tuple[Tensor, Tensor]:
    """Gradients of x and of all weights (`gradients`); the weights' are summed in the weights' own dtype."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    maps, activation = _maps(weights, networks, x.dtype), ACTIVATIONS[networks.activation]
    shares = _shares(x, len(maps))
    # Each thread sums gradients of its own, added in order: the same result whichever thread is first.
    totals = [[_zeros(of_map, dtype_of_all(weights)) for of_map in maps] for _ in shares]

    def work(share: Sequence[tuple[int, _Part]]) -> None:
        """The gradients that the pieces of one thread give."""
        for thread, (index, part) in share:
            rows, levels = x[part], maps[index]
            tape = _sketch_kept(rows.reshape(-1, rows.shape[-1]), levels, activation)
            grad_rows = grad[part].reshape(1, -1, grad.shape[-1])
            found = _sketch_backward(grad_rows, levels, activation, totals[thread][index], tape)
            grad_x[part] = found.view(rows.shape)

    run_in_parallel(work, [[(thread, part) for part in share] for thread, share in enumerate(shares)])
    summed = [_summed([total[index] for total in totals]) for index in range(len(maps))]
    return grad_x, joined([grad for levels in summed for grad in _weight_gradients(levels)])


class _Stage(NamedTuple):
    """A stage of the k networks of a level: scale and bias of the norm (k, 1, in), up and down (k, out, in)."""

    scale: Tensor
    bias: Tensor
    up: Tensor
    down: Tensor


_Level = list[_Stage]  # the networks of a level, side by side


class _Passed(NamedTuple):
    """What the backward pass of a stage needs."""

    inputs: Tensor
    statistics: tuple[Tensor, Tensor]
    standard: Tensor
    normed: Tensor
    hidden: Tensor
    active: tuple[Tensor, Tensor | None]


class _Activations(NamedTuple):
    """What the backward pass of a level needs."""

    stages: list[_Passed]
    outputs: Tensor
    combined: Tensor


def _maps(weights: list[Tensor], networks: Networks, dtype: torch.dtype) -> list[list[_Level]]:
    """The flat list as the levels of each map."""
    size = networks.tensors
    return [list(_levels(weights[start : start + size], networks, dtype)) for start in range(0, len(weights), size)]


def _levels(weights: list[Tensor], networks: Networks, dtype: torch.dtype) -> Iterator[_Level]:
    """The networks of one map side by side, level by level."""
    size = networks.depth * TENSORS
    of_networks = iter([weights[start : start + size] for start in range(0, len(weights), size)])
    for count in networks.levels:
        level = [next(of_networks) for _ in range(count)]
        yield [_stack([one[first : first + TENSORS] for one in level], dtype) for first in range(0, size, TENSORS)]


def _stack(stages: list[list[Tensor]], dtype: torch.dtype) -> _Stage:
    scale, bias, up, down = (torch.stack(tensors).to(dtype) for tensors in zip(*stages, strict=True))
    return _Stage(scale[:, None], bias[:, None], up, down)


def _zeros(levels: list[_Level], dtype: torch.dtype) -> list[_Level]:
    return [
        [_Stage(*(torch.zeros_like(tensor, dtype=dtype) for tensor in stage)) for stage in level] for level in levels
    ]


def _summed(totals: list[list[_Level]]) -> list[_Level]:
    """The sums of all threads, in order."""
    result = totals[0]
    for other in totals[1:]:
        for level, more in zip(result, other, strict=True):
            for stage, part in zip(level, more, strict=True):
                for tensor, summand in zip(stage, part, strict=True):
                    tensor.add_(summand)
    return result


def _weight_gradients(levels: list[_Level]) -> Iterator[Tensor]:
    """The flat list of gradients, in the order of the weights."""
    for level in levels:
        for index in range(len(level[0].up)):
            for stage in level:
                yield from (stage.scale[index, 0], stage.bias[index, 0], stage.up[index], stage.down[index])


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


def _sketch(rows: Tensor, levels: list[_Level], activation: Activation, workspace: Workspace) -> Tensor:
    """(m, head_dim) -> (m, r), by the recursion of Algorithm 2 from its leaves up, with one piece of scratch memory."""
    values = rows[None]
    for level in levels:
        for stage in level:
            values = _pass(values, stage, activation, workspace)
        values = _combine(values[::2], values[1::2])
    return values[0]


def _sketch_kept(rows: Tensor, levels: list[_Level], activation: Activation) -> list[_Activations]:
    """What the backward pass needs of each level."""
    values, tape = rows[None], []
    for level in levels:
        stages = []
        for stage in level:
            values, kept = _pass_kept(values, stage, activation)
            stages.append(kept)
        outputs, values = values, _combine(values[::2], values[1::2])
        tape.append(_Activations(stages, outputs, values))
    return tape


def _sketch_backward(
    grad: Tensor, levels: list[_Level], activation: Activation, totals: list[_Level], tape: list[_Activations]
) -> Tensor:
    """The gradient of the rows, given that of the features (1, m, r); adds those of the weights to `totals`."""
    for level, total, kept in reversed(list(zip(levels, totals, tape, strict=True))):
        grad = _combine_backward(grad, kept.combined, kept.outputs)
        for stage, sums, passed in reversed(list(zip(level, total, kept.stages, strict=True))):
            grad = _pass_backward(grad, stage, activation, sums, passed)
    return grad[0]


def _combine(left: Tensor, right: Tensor) -> Tensor:
    """sqrt(r) tanh(sqrt(1/r) left * right), in float32 or better."""
    root = left.shape[-1] ** 0.5
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide) * right).mul_(1 / root).tanh_().mul_(root).to(left.dtype)


def _combine_backward(grad: Tensor, combined: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of the outputs (k, m, r) that were combined in pairs."""
    grad = torch.addcmul(grad, grad, combined * combined, value=-1 / combined.shape[-1])
    result = torch.empty_like(outputs)
    torch.mul(grad, outputs[1::2], out=result[::2])
    torch.mul(grad, outputs[::2], out=result[1::2])
    return result


def _pass(values: Tensor, stage: _Stage, activation: Activation, workspace: Workspace) -> Tensor:
    """values (k, m, w), or (1, m, w) for all k networks -> (k, m, r)."""
    standard, _, _ = torch.native_layer_norm(values, values.shape[-1:], None, None, _NORM_EPSILON)
    normed = torch.addcmul(stage.bias, standard, stage.scale)
    shape = (*normed.shape[:2], stage.up.shape[1])
    hidden = torch.bmm(normed, stage.up.mT, out=workspace.take("hidden", shape, normed))
    return torch.bmm(activation.apply_(hidden, workspace.take("scratch", shape, normed)), stage.down.mT)


def _pass_kept(values: Tensor, stage: _Stage, activation: Activation) -> tuple[Tensor, _Passed]:
    """As `_pass`, with what the backward pass needs."""
    standard, mean, deviation = torch.native_layer_norm(values, values.shape[-1:], None, None, _NORM_EPSILON)
    normed = torch.addcmul(stage.bias, standard, stage.scale)
    hidden = torch.bmm(normed, stage.up.mT)
    active = activation.apply(hidden)
    kept = _Passed(values, (mean, deviation), standard, normed, hidden, active)
    return torch.bmm(active[0], stage.down.mT), kept


def _pass_backward(grad: Tensor, stage: _Stage, activation: Activation, total: _Stage, kept: _Passed) -> Tensor:
    """The gradient of a stage's inputs; adds those of its weights to `total`."""
    _add(total.down, grad.mT, kept.active[0])
    grad = activation.backward(torch.bmm(grad, stage.down), kept.hidden, kept.active)
    _add(total.up, grad.mT, kept.normed)
    grad = torch.bmm(grad, stage.up)
    total.scale.add_((grad * kept.standard).sum(1, keepdim=True))
    total.bias.add_(grad.sum(1, keepdim=True))
    grad = grad.mul_(stage.scale)
    if len(grad) > len(kept.inputs):
        grad = grad.sum(0, keepdim=True)
    found = torch.ops.aten.native_layer_norm_backward(
        grad, kept.inputs, grad.shape[-1:], *kept.statistics, None, None, [True, False, False]
    )
    return found[0]


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, of few rows at a time: a device adds them up one after the other, and rounds each time."""
    for some, others in zip(left.split(_SUMMED_ROWS, 2), right.split(_SUMMED_ROWS, 1), strict=True):
        if total.dtype == left.dtype:
            total.baddbmm_(some, others)
        else:
            total.add_(torch.bmm(some, others))
