"""Where gradients of keys through tiles are added up: runs of tiles with the same keys, and a list for every key."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.hyper.meetings import Meetings


def runs_of_tiles(met: Meetings, size: int, longest: int) -> Tensor:
    """For how many tiles from each on a block of columns has the same keys; 0 in the tiles that another's run has.

    Tiles without queries at a run's end are left out of it; a run of nothing else is 0.

    Args:
        met: of some tiles.
        size: columns of a block, the last of which may have fewer.
        longest: tiles of a run.

    Returns:
        (batch, key_heads, tiles, column blocks) int32.
    """
    key = met.key
    tiles = key.shape[2]
    number = torch.arange(tiles, device=key.device)
    blocks = F.pad(key, (0, -key.shape[3] % size)).unflatten(-1, (-1, size))
    same = (blocks[:, :, 1:] == blocks[:, :, :-1]).all(-1)
    begins = F.pad(~same, (0, 0, 1, 0), value=True) | (number % longest == 0)[:, None]
    # The tile with which the next run begins, the smallest that is later; a run ends before it.
    starts = torch.where(begins, number[:, None], tiles)
    later = F.pad(starts[:, :, 1:], (0, 0, 0, 1), value=tiles).flip(2).cummin(2).values.flip(2)
    last_asked = torch.where((met.query >= 0).any(-1), number, -1).cummax(2).values
    last = last_asked.unsqueeze(-1).expand(later.shape).gather(2, later - 1)
    return torch.where(begins, (last - number[:, None] + 1).clamp(min=0), 0).int()


def lists_of_keys(met: Meetings, runs: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The places where the gradient of every key lies: places of key 0, then of key 1, and so on, each in order.

    A place is a column of the first tile of a run, tile * keys + column; of columns that no tile of the run sees there
    is none.

    Args:
        met: of some tiles.
        runs: of `runs_of_tiles`, with the same `size`.
        size: columns of a block.
        length: keys of all.

    Returns:
        (batch * key_heads, tiles * keys) int32, what comes behind the last list of no meaning; and (batch * key_heads,
        length + 1) int32, where each list begins.
    """
    tiles, columns = met.key.shape[2:]
    counts = runs.repeat_interleave(size, -1)[..., :columns].long()
    seen = F.pad((met.log_weight > -torch.inf).cumsum(2), (0, 0, 1, 0))
    number = torch.arange(tiles, device=runs.device)[:, None]
    of_run = seen.gather(2, number + counts) - seen[:, :, :-1]
    key = torch.where(of_run > 0, met.key, length).flatten(0, 1).flatten(1)
    ordered, order = key.sort(dim=-1, stable=True)
    numbers = torch.arange(length + 1, device=key.device, dtype=ordered.dtype).expand(len(key), -1).contiguous()
    return order.int(), torch.searchsorted(ordered, numbers, out_int32=True)
