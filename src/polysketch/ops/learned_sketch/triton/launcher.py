"""The networks of the learned sketch as programs in Triton (`programs`).

Forward launches one program a level, with the weights in shared memory where they fit; backward makes the levels'
inputs again, then goes from the last level to the first, a stage of the networks at a time. Besides inputs and outputs
of stages, r wide, and sums of gradients of weights, nothing reaches the memory.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.gradients import dtype_of_all
from polysketch.ops.learned_sketch.networks import Networks
from polysketch.ops.learned_sketch.triton.call import Call, Level, Stage, calls_of, configuration_of, constants_of
from polysketch.ops.learned_sketch.triton.weight_sums import WeightSums, added_up, room_for_sums
from polysketch.ops.triton import launch, why_not

__all__ = ["backward", "forward", "why_not"]


def forward(inputs: list[Tensor], weights: list[Tensor], networks: Networks) -> list[Tensor]:
    """phi of each input; arguments as in `learned_sketches`."""
    return [_features(call, x) for call, x in zip(calls_of(inputs, weights, networks), inputs, strict=True)]


def _features(call: Call, x: Tensor) -> Tensor:
    values = _values(x)
    for level in call.levels:
        values = _combined(call, level, values)
    return values[0]


def backward(grads: list[Tensor], inputs: list[Tensor], weights: list[Tensor], networks: Networks) -> list[Tensor]:
    """Gradients of each input, and of all weights; the weights' are summed in float32, always in the same order."""
    calls = calls_of(inputs, weights, networks)
    rooms = [room_for_sums(calls, level, inputs[0].device) for level in calls[0].levels]
    found = [
        _input_gradient(call, x, grad, [of_inputs[index] for _, of_inputs in rooms])
        for index, (call, x, grad) in enumerate(zip(calls, inputs, grads, strict=True))
    ]
    return [*found, added_up([of_all for of_all, _ in rooms]).to(dtype_of_all(weights))]


def _input_gradient(call: Call, x: Tensor, grad: Tensor, sums: list[WeightSums]) -> Tensor:
    """The gradient of one input; writes the sums of every level."""
    values = [_values(x)]
    for level in call.levels[:-1]:
        values.append(_combined(call, level, values[-1]))
    grad = grad.contiguous()[None]
    for level, inputs, of_level in reversed(list(zip(call.levels, values, sums, strict=True))):
        middles, grad = _pairs_backward(call, level, inputs, grad)
        stages = zip(level.stages, [inputs, *middles], of_level.configurations, strict=True)
        for stage, taken, use in reversed(list(stages)):
            _weights_backward(call, level, stage, taken, grad, of_level, use)
            grad = _inputs_backward(call, level, stage, taken, grad)
    return grad[0].to(x.dtype)


def _values(x: Tensor) -> Tensor:
    """x as the values of a level, (1, batch, heads, length, head_dim)."""
    return (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous())[None]


def _combined(call: Call, level: Level, values: Tensor) -> Tensor:
    """The values of the next level, (networks / 2, batch, heads, length, size)."""
    combined = _empty(call, level.networks // 2, call.size, values)
    _launch_pairs(call, level, values, combined, None, None, None)
    return combined


def _pairs_backward(call: Call, level: Level, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of every network of a level its middles, stage by stage, and the gradient of its output."""
    between = len(level.stages) - 1
    middles = _empty(call, between * level.networks, call.size, values, _inside(call))
    output_grads = _empty(call, level.networks, call.size, values, _inside(call))
    _launch_pairs(call, level, values, None, grad, middles, output_grads)
    return middles.unflatten(0, (between, level.networks)), output_grads


def _launch_pairs(call: Call, level: Level, values: Tensor, *tensors: Tensor | None) -> None:
    from polysketch.ops.learned_sketch.triton.programs.networks import learned_sketch
    from polysketch.ops.learned_sketch.triton.programs.resident import learned_sketch_resident

    keeps, depth, first = int(tensors[0] is None), len(level.stages), level.stages[0]
    pairs = level.networks // 2
    chosen = configuration_of("learned_sketch", call, first, values.device, keeps=keeps, pairs=pairs, depth=depth)
    tiles = -(-call.rows // chosen["TOKENS"])
    every = pairs * call.maps
    constants: dict[str, Any] = {"configuration": chosen, "PAIRS": pairs, "DEPTH": depth, **constants_of(call, first)}
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


def _inputs_backward(call: Call, level: Level, stage: Stage, values: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the values of a stage, given that of its outputs, (networks, batch, heads, length, size)."""
    from polysketch.ops.learned_sketch.triton.programs.backward import learned_sketch_inputs_backward

    chosen = configuration_of("learned_sketch_inputs_backward", call, stage, values.device)
    taken, tiles = level.networks // stage.shared, -(-call.rows // chosen["TOKENS"])
    grad_values = _empty(call, taken, stage.inputs, values, _inside(call))
    launch(
        learned_sketch_inputs_backward,
        tiles * taken * call.maps,
        *(values, stage.weights, grad, grad_values, *_strides(stage, values), call.length, call.rows, tiles),
        configuration=chosen,
        **_of_stage(level, stage),
        **constants_of(call, stage),
    )
    return grad_values


def _weights_backward(
    call: Call, level: Level, stage: Stage, values: Tensor, grad: Tensor, sums: WeightSums, use: dict[str, int]
) -> None:
    """Write the sums of a stage, given the gradient of its outputs, (networks, batch, heads, length, size)."""
    from polysketch.ops.learned_sketch.triton.programs.backward import learned_sketch_weights_backward

    tiles, spans, slices = -(-call.rows // use["TOKENS"]), sums.norms.shape[0], sums.norms.shape[3]
    launch(
        learned_sketch_weights_backward,
        spans * level.networks * call.maps * -(-call.hidden // use["BLOCK"]),
        *(values, stage.weights, grad, *sums.of_stage(stage), *_strides(stage, values), call.length, call.rows),
        *(tiles, -(-tiles // max(1, spans)), spans, slices),
        configuration=use,
        NETWORK_NORMS=level.norms,
        NETWORK_MATRICES=level.matrices,
        **_of_stage(level, stage),
        **constants_of(call, stage),
    )


def _empty(call: Call, networks: int, width: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(networks, call.batch, call.heads, call.length, width, dtype=dtype)


def _inside(call: Call) -> torch.dtype:
    """Dtype of what lies between programs in backward: middles and gradients may leave float16's range."""
    return torch.bfloat16 if call.dtype == torch.bfloat16 else torch.float32


def _strides(stage: Stage, values: Tensor) -> tuple[int, ...]:
    """Elements from one network's values to the next's, and strides of batch, heads and tokens."""
    return (values.stride(0) if stage.shared == 1 else 0, *values.stride()[1:4])


def _of_stage(level: Level, stage: Stage) -> dict[str, int]:
    return {"NETWORKS": level.networks, "SHARED": stage.shared, "NETWORK_WEIGHTS": stage.network_weights}
