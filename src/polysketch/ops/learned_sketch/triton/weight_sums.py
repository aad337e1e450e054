"""Gradients of weights on their way: every program sums a span of rows of an input, then all spans are added up.

Sums of all stages and inputs lie side by side, so that there are two additions a level, however many weights it has.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.triton.call import Call, Level, Stage, configuration_of

_PROGRAMS = 512  # that sum gradients of weights: a few for every multiprocessor, whatever the device, for the same bits
_LEAST_TILES = 4  # that one of them goes through


class WeightSums(NamedTuple):
    """Gradients of the weights of a level by spans of rows, float32.

    Attributes:
        norms: (spans, maps, networks, slices, numbers), of slices of hidden units.
        matrices: (spans, maps, networks, numbers).
        configurations: of the programs that write them, stage by stage.
    """

    norms: Tensor
    matrices: Tensor
    configurations: list[dict[str, int]]

    def of_stage(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """Views that begin where a stage's own numbers begin."""
        return self.norms[..., stage.norms :], self.matrices[..., stage.matrices :]


def room_for_sums(calls: list[Call], level: Level, device: torch.device) -> tuple[WeightSums, list[WeightSums]]:
    """Of all inputs together, and the parts of each."""
    program = "learned_sketch_weights_backward"
    use = [configuration_of(program, calls[0], stage, device) for stage in level.stages]
    slices = {-(-calls[0].hidden // one["BLOCK"]) for one in use}
    spans = [max(_spans(call, level, one) for one in use) for call in calls]
    each = (calls[0].maps, level.networks)
    # The slices that one stage has and another has not count as nothing.
    room = torch.empty if len(slices) == 1 else torch.zeros
    norms = room(sum(spans), *each, max(slices), level.norms, dtype=torch.float32, device=device)
    matrices = torch.empty(sum(spans), *each, level.matrices, dtype=torch.float32, device=device)
    parts = zip(norms.split(spans), matrices.split(spans), strict=True)
    return WeightSums(norms, matrices, use), [WeightSums(*part, use) for part in parts]


def _spans(call: Call, level: Level, use: dict[str, int]) -> int:
    """Enough to occupy a device, none shorter than is worth a program."""
    slices = -(-call.hidden // use["BLOCK"]) * level.networks * call.maps
    tiles = -(-call.rows // use["TOKENS"])
    return -(-tiles // max(_LEAST_TILES, -(-tiles * slices // _PROGRAMS)))


def added_up(levels: list[WeightSums]) -> Tensor:
    """Gradients of all weights as `gradients` has them: norms before matrices, both map by map and level by level."""
    maps = levels[0].matrices.shape[1]
    norms = [(one.norms.shape[2], one.norms.shape[4]) for one in levels]
    matrices = [(one.matrices.shape[2], one.matrices.shape[3]) for one in levels]
    lengths = [maps * sum(networks * numbers for networks, numbers in part) for part in (norms, matrices)]
    found = levels[0].norms.new_empty(sum(lengths))
    of_norms, of_matrices = found.split(lengths)
    for one, room in zip(levels, _by_level(of_norms, maps, norms), strict=True):
        torch.sum(one.norms, (0, 3), out=room)
    for one, room in zip(levels, _by_level(of_matrices, maps, matrices), strict=True):
        torch.sum(one.matrices, 0, out=room)
    return found


def _by_level(flat: Tensor, maps: int, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Views (maps, networks, numbers), given networks and numbers of each level."""
    parts = flat.view(maps, -1).split([networks * numbers for networks, numbers in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
