"""Memory that a training step needs at least, compared with what is free before the first one."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from polysketch.nn import GatedLinearUnit
from polysketch.training.config import TrainingConfig

_BYTES_OF_A_WEIGHT = 12  # float32: its gradient and two moments of AdamW; the weight itself is there already
_BYTES_OF_AN_ID = 8
_MORE_THAN_LEAST = 6  # times the least estimate, what a step takes of the mechanisms that take much


def least_bytes_of_a_token(model: nn.Module, itemsize: int, *, checkpointing: bool = False) -> int:
    """Bytes of a token that are kept from the forward for the backward pass, at least.

    What a matrix of a block gives is kept: queries, keys, values, gates, what is added to the residual stream. What
    norms, activations and mechanisms keep is not counted. It makes up for the matrices of a decoder, which keep less
    where its texts are shorter than the encoder's.

    Args:
        model: of blocks with a gated linear unit each.
        itemsize: bytes of a number in what the matrices give.
        checkpointing: whether each block keeps its input alone; then only that is counted.
    """
    widths = [one.down.out_features for one in model.modules() if isinstance(one, GatedLinearUnit)]
    if checkpointing:
        return _BYTES_OF_AN_ID + itemsize * sum(widths)
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    matrices = [one for one in model.parameters() if one.dim() == 2 and id(one) not in tables]
    given = sum(one.shape[0] for one in matrices if widths and widths[0] in one.shape)
    return _BYTES_OF_AN_ID + itemsize * given


def free_bytes(device: torch.device) -> int | None:
    """Memory that a new tensor could have on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_in_main_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))


def check_memory(
    model: nn.Module, config: TrainingConfig, device: torch.device, dtype: torch.dtype, shared: int
) -> None:
    """Refuse a batch that cannot fit, before anything is computed.

    Args:
        model: with its weights.
        config: the options.
        device, dtype: of the steps.
        shared: processes that share the rows.

    Raises:
        ValueError: naming what is needed, what is free, and how many rows are likely to fit.
    """
    free = free_bytes(device)
    if free is None:
        return
    parts = config.accumulation * shared
    of_token = least_bytes_of_a_token(model, dtype.itemsize, checkpointing=config.activation_checkpointing)
    weights = _BYTES_OF_A_WEIGHT * sum(parameter.numel() for parameter in model.parameters()) // shared
    needed = weights + config.batch_size * config.context * of_token // parts
    if needed <= free:
        return
    fitting = int((free - weights) / (_MORE_THAN_LEAST * of_token * config.context)) * parts
    remedy = (
        f"--batch-size {fitting} is likely to fit"
        if fitting >= parts
        else "no row is likely to fit: a smaller --preset, a shorter --context or --activation-checkpointing may help"
    )
    raise ValueError(
        f"--batch-size {config.batch_size}: expected a step that fits into the {_gigabytes(free)} that are free, found "
        f"one of {config.context:,} tokens a row that needs at least {_gigabytes(needed)}: {remedy}"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def _free_in_main_memory(meminfo: Path, cgroup: Path) -> int | None:
    found = [_available(meminfo), _left_in_cgroup(cgroup)]
    return min((one for one in found if one is not None), default=None)


def _available(meminfo: Path) -> int | None:
    """What Linux says could be allocated without swapping."""
    try:
        line = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(line[1]) * 1024 if line else None


def _left_in_cgroup(cgroup: Path) -> int | None:
    """What a container may still take, where it has a limit."""
    try:
        most, taken = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if most == "max" else max(0, int(most) - int(taken))
    except (OSError, ValueError):
        return None
