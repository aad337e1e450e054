"""The networks of the learned sketch as programs in Triton (`programs`).

Forward launches one program a level, with the weights in shared memory where they fit; backward makes the levels'
inputs again, then goes from the last level to the first, a stage of the networks at a time. Besides inputs and outputs
of stages, r wide, nothing reaches the memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.networks import TENSORS, Networks
from polysketch.ops.triton import configuration, launch, precision, why_not

__all__ = ["backward", "forward", "why_not"]

_PROGRAMS = 512  # that sum gradients of weights: a few for every multiprocessor, whatever the device, for the same bits
_LEAST_TILES = 4  # that one of them goes through


class _Stage(NamedTuple):
    """One stage of the networks of a level in the flat weights.

    Attributes:
        weights: from this stage of the level's first network on.
        network_weights: elements from one network to the next.
        inputs: width of its input.
        shared: networks that take the same input.
    """

    weights: Tensor
    network_weights: int
    inputs: int
    shared: int


class _Level(NamedTuple):
    """The networks of one level.

    Attributes:
        networks: how many.
        stages: LN, up, activation, down of the level's values, then the same of the middles.
    """

    networks: int
    stages: list[_Stage]


class _Call(NamedTuple):
    """What every launch of a call needs.

    Attributes:
        batch, heads, length: of x.
        maps: networks' owners, each of heads / maps heads.
        size: r.
        hidden: units.
        activation: its name.
        map_weights: elements of the weights of a map.
        dtype: of x.
        levels: from the leaves up.
    """

    batch: int
    heads: int
    length: int
    maps: int
    size: int
    hidden: int
    activation: str
    map_weights: int
    dtype: torch.dtype
    levels: list[_Level]

    @property
    def rows(self) -> int:
        """Of one map."""
        return self.batch * self.heads // self.maps * self.length


def forward(x: Tensor, weights: list[Tensor], networks: Networks) -> Tensor:
    """phi(x); arguments as in `learned_sketch`."""
    values, call = _values(x), _call(x, weights, networks)
    for level in call.levels:
        values = _combined(call, level, values)
    return values[0]


def backward(grad: Tensor, x: Tensor, weights: list[Tensor], networks: Networks) -> list[Tensor]:
    """Gradients of x and of every weight; the weights' are summed in float32, always in the same order."""
    call, values = _call(x, weights, networks), [_values(x)]
    for level in call.levels[:-1]:
        values.append(_combined(call, level, values[-1]))
    grad = grad.contiguous()[None]
    found: list[list[Tensor]] = []
    for level, inputs in zip(reversed(call.levels), reversed(values), strict=True):
        middles, grad = _pairs_backward(call, level, inputs, grad)
        of_stages: list[list[Tensor]] = []
        for stage, taken in reversed(list(zip(level.stages, [inputs, *middles], strict=True))):
            of_stages.insert(0, _weights_backward(call, level, stage, taken, grad))
            grad = _inputs_backward(call, level, stage, taken, grad)
        found.insert(0, [tensor for of_stage in of_stages for tensor in of_stage])
    # Results of an operator may not share memory.
    gradients = (
        level[tensor][owner, network].clone()
        for owner in range(call.maps)
        for level in found
        for network in range(level[0].shape[1])
        for tensor in range(TENSORS * networks.depth)
    )
    return [grad[0].to(x.dtype), *(one.to(weight.dtype) for one, weight in zip(gradients, weights, strict=True))]


def _values(x: Tensor) -> Tensor:
    """x as the values of a level, (1, batch, heads, length, head_dim)."""
    return (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous())[None]


def _call(x: Tensor, weights: list[Tensor], networks: Networks) -> _Call:
    batch, heads, length, inputs = x.shape
    hidden, size = weights[2].shape[0], weights[-1].shape[0]
    maps = len(weights) // networks.tensors
    if batch * heads * length >= 2**31:
        raise ValueError(f"the triton backend takes fewer than 2^31 rows of heads, got {tuple(x.shape)}")
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights]).to(x.dtype)
    activation, levels = networks.activation, _levels(flat, networks, inputs, size, hidden)
    return _Call(batch, heads, length, maps, size, hidden, activation, len(flat) // maps, x.dtype, levels)


def _levels(flat: Tensor, networks: Networks, inputs: int, size: int, hidden: int) -> list[_Level]:
    levels: list[_Level] = []
    start = 0
    for count in networks.levels:
        shared = 1 if levels else count
        widths = [size if levels else inputs, *[size] * (networks.depth - 1)]
        lengths = [2 * width + hidden * (width + size) for width in widths]
        places = [start + sum(lengths[:stage]) for stage in range(networks.depth)]
        stages = [
            _Stage(flat[place:], sum(lengths), width, 1 if stage else shared)
            for stage, (place, width) in enumerate(zip(places, widths, strict=True))
        ]
        levels.append(_Level(count, stages))
        start += count * sum(lengths)
    return levels


def _combined(call: _Call, level: _Level, values: Tensor) -> Tensor:
    """The values of the next level, (networks / 2, batch, heads, length, size)."""
    combined = _empty(call, level.networks // 2, call.size, values)
    _launch_pairs(call, level, values, combined, None, None, None)
    return combined


def _pairs_backward(call: _Call, level: _Level, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of every network of a level its middles, stage by stage, and the gradient of its output."""
    between = len(level.stages) - 1
    middles = _empty(call, between * level.networks, call.size, values, _inside(call))
    output_grads = _empty(call, level.networks, call.size, values, _inside(call))
    _launch_pairs(call, level, values, None, grad, middles, output_grads)
    return middles.unflatten(0, (between, level.networks)), output_grads


def _launch_pairs(call: _Call, level: _Level, values: Tensor, *tensors: Tensor | None) -> None:
    from polysketch.ops.learned_sketch.triton.programs.networks import learned_sketch
    from polysketch.ops.learned_sketch.triton.programs.resident import learned_sketch_resident

    keeps, depth, first = int(tensors[0] is None), len(level.stages), level.stages[0]
    pairs = level.networks // 2
    chosen = _configuration("learned_sketch", call, first, values, keeps=keeps, pairs=pairs, depth=depth)
    tiles = -(-call.rows // chosen["TOKENS"])
    every = pairs * call.maps
    constants: dict[str, Any] = {"configuration": chosen, "PAIRS": pairs, "DEPTH": depth, **_constants(call, first)}
    arguments = (values, first.weights, *tensors, *_strides(first, values), call.length, call.rows, tiles)
    if not chosen.pop("resident"):
        launch(learned_sketch, tiles * every, *arguments, **constants)
        return
    each = max(1, -(-tiles * every // _multiprocessors(values.device)))
    programs = -(-tiles // each)
    shared = first.shared > 1
    launch(learned_sketch_resident, programs * every, *arguments, each, programs, SHARED=shared, **constants)


def _multiprocessors(device: torch.device) -> int:
    """Of a device that is there; else of an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _inputs_backward(call: _Call, level: _Level, stage: _Stage, values: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the values of a stage, given that of its outputs, (networks, batch, heads, length, size)."""
    from polysketch.ops.learned_sketch.triton.programs.backward import learned_sketch_inputs_backward

    chosen = _configuration("learned_sketch_inputs_backward", call, stage, values)
    taken, tiles = level.networks // stage.shared, -(-call.rows // chosen["TOKENS"])
    grad_values = _empty(call, taken, stage.inputs, values, _inside(call))
    launch(
        learned_sketch_inputs_backward,
        tiles * taken * call.maps,
        *(values, stage.weights, grad, grad_values, *_strides(stage, values), call.length, call.rows, tiles),
        configuration=chosen,
        **_of_stage(level, stage),
        **_constants(call, stage),
    )
    return grad_values


def _weights_backward(call: _Call, level: _Level, stage: _Stage, values: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of norm scale, norm bias, up and down of a stage, each (maps, networks, ...), float32."""
    from polysketch.ops.learned_sketch.triton.programs.backward import learned_sketch_weights_backward

    chosen = _configuration("learned_sketch_weights_backward", call, stage, values)
    slices = -(-call.hidden // chosen["BLOCK"]) * level.networks * call.maps
    tiles = -(-call.rows // chosen["TOKENS"])
    tiles_per_span = max(_LEAST_TILES, -(-tiles * slices // _PROGRAMS))
    spans = -(-tiles // tiles_per_span)
    shape = (spans, call.maps, level.networks, call.hidden)
    sums = [torch.empty(*shape, *width, dtype=torch.float32, device=values.device) for width in _widths(call, stage)]
    launch(
        learned_sketch_weights_backward,
        spans * slices,
        *(values, stage.weights, grad, *sums, *_strides(stage, values), call.length, call.rows),
        *(tiles, tiles_per_span, spans),
        configuration=chosen,
        **_of_stage(level, stage),
        **_constants(call, stage),
    )
    return _of_sums(call, level, stage, [part.sum(0) for part in sums])


def _of_sums(call: _Call, level: _Level, stage: _Stage, sums: Sequence[Tensor]) -> list[Tensor]:
    """What the sums over all rows make the gradients of a stage's weights; see `learned_sketch_weights_backward`."""
    up_sums, down_sums, hidden_sums = sums
    shape = (call.maps, level.networks, 2 * stage.inputs + call.hidden * stage.inputs)
    block = stage.weights.as_strided(shape, (call.map_weights, stage.network_weights, 1)).float()
    scale, bias, up = block.split([stage.inputs, stage.inputs, call.hidden * stage.inputs], -1)
    up = up.unflatten(-1, (call.hidden, stage.inputs))
    grad_up = up_sums * scale[..., None, :] + hidden_sums[..., None] * bias[..., None, :]
    return [(up * up_sums).sum(-2), (up * hidden_sums[..., None]).sum(-2), grad_up, down_sums.mT.contiguous()]


def _widths(call: _Call, stage: _Stage) -> list[list[int]]:
    return [[stage.inputs], [call.size], []]


def _empty(call: _Call, networks: int, width: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(networks, call.batch, call.heads, call.length, width, dtype=dtype)


def _inside(call: _Call) -> torch.dtype:
    """Dtype of what lies between programs in backward: middles and gradients may leave float16's range."""
    return torch.bfloat16 if call.dtype == torch.bfloat16 else torch.float32


def _strides(stage: _Stage, values: Tensor) -> tuple[int, ...]:
    """Elements from one network's values to the next's, and strides of batch, heads and tokens."""
    return (values.stride(0) if stage.shared == 1 else 0, *values.stride()[1:4])


def _of_stage(level: _Level, stage: _Stage) -> dict[str, int]:
    return {"NETWORKS": level.networks, "SHARED": stage.shared, "NETWORK_WEIGHTS": stage.network_weights}


def _constants(call: _Call, stage: _Stage) -> dict[str, Any]:
    import triton.language as tl

    return {
        "HEADS": call.heads,
        "MAPS": call.maps,
        "INPUTS": stage.inputs,
        "SIZE": call.size,
        "HIDDEN": call.hidden,
        "ACTIVATION": call.activation,
        "MAP_WEIGHTS": call.map_weights,
        "FAST": call.dtype == torch.bfloat16,
        "PRECISION": precision(call.dtype),
        "DOT": tl.bfloat16 if call.dtype == torch.bfloat16 else tl.float32,
        "INPUT_LANES": _lanes(stage.inputs),
        "LANES": _lanes(call.size),
    }


def _configuration(program: str, call: _Call, stage: _Stage, values: Tensor, **more: int) -> dict[str, int]:
    return configuration(
        program,
        values.device,
        inputs=_lanes(stage.inputs),
        size=_lanes(call.size),
        hidden=call.hidden,
        activation=call.activation,
        operand_bytes=2 if call.dtype == torch.bfloat16 else 4,
        **more,
    )


def _lanes(width: int) -> int:
    """Least power of two that holds a row and is as wide as matrix instructions need."""
    return max(16, 1 << (width - 1).bit_length())
