"""What the launches of a call need: the networks' weights as the programs read them, sizes, constants."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.networks import Networks
from polysketch.ops.triton import configuration, precision


class Stage(NamedTuple):
    """One stage of the networks of a level in the flat weights.

    Attributes:
        weights: from this stage of the level's first network on.
        network_weights: elements from one network to the next.
        inputs: width of its input.
        shared: networks that take the same input.
        norms, matrices: where its own begin among the numbers of the norms, and of the matrices, of a network.
    """

    weights: Tensor
    network_weights: int
    inputs: int
    shared: int
    norms: int
    matrices: int


class Level(NamedTuple):
    """The networks of one level.

    Attributes:
        networks: how many.
        stages: LN, up, activation, down of the level's values, then the same of the middles.
        norms, matrices: numbers of a network.
    """

    networks: int
    stages: list[Stage]
    norms: int
    matrices: int


class Call(NamedTuple):
    """One input.

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
    levels: list[Level]

    @property
    def rows(self) -> int:
        """Of one map."""
        return self.batch * self.heads // self.maps * self.length


def calls_of(inputs: list[Tensor], weights: list[Tensor], networks: Networks) -> list[Call]:
    """One for each input, of the same weights, which are joined and rounded once."""
    for x in inputs:
        if x.shape[:3].numel() >= 2**31:
            raise ValueError(f"the triton backend takes fewer than 2^31 rows of heads, got {tuple(x.shape)}")
    dtype, maps = inputs[0].dtype, len(weights) // networks.tensors
    hidden, size = weights[2].shape[0], weights[-1].shape[0]
    flat = torch.cat([weight.reshape(-1) for weight in weights]).to(dtype)
    of_map, levels = len(flat) // maps, _levels(flat, networks, inputs[0].shape[3], size, hidden)
    shapes = [x.shape[:3] for x in inputs]
    return [
        Call(batch, heads, length, maps, size, hidden, networks.activation, of_map, dtype, levels)
        for batch, heads, length in shapes
    ]


def _levels(flat: Tensor, networks: Networks, inputs: int, size: int, hidden: int) -> list[Level]:
    levels: list[Level] = []
    start = 0
    for count in networks.levels:
        widths = [size if levels else inputs, *[size] * (networks.depth - 1)]
        norms, matrices = [2 * width for width in widths], [hidden * (width + size) for width in widths]
        network = sum(norms) + sum(matrices)
        stages = [
            Stage(
                weights=flat[start + sum(norms[:stage]) + sum(matrices[:stage]) :],
                network_weights=network,
                inputs=width,
                shared=1 if levels or stage else count,
                norms=sum(norms[:stage]),
                matrices=sum(matrices[:stage]),
            )
            for stage, width in enumerate(widths)
        ]
        levels.append(Level(count, stages, sum(norms), sum(matrices)))
        start += count * network
    return levels


def constants_of(call: Call, stage: Stage) -> dict[str, Any]:
    """Constants of every program."""
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


def configuration_of(program: str, call: Call, stage: Stage, device: torch.device, **more: int) -> dict[str, int]:
    """The constants with which a program is launched."""
    return configuration(
        program,
        device,
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
