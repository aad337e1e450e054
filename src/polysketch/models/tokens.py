"""What every model over token ids checks of them, and the positions that it gives them."""

import torch
from torch import Tensor

from polysketch.attention import advance_positions
from polysketch.targets import NO_TARGET


def check_ids(ids: Tensor, vocab_size: int, device: torch.device) -> None:
    """Refuse what are no token ids of a model on `device`.

    Raises:
        ValueError: another dtype than int64 or shape than (batch, length), another device, or ids beyond the
            vocabulary: looked for on a CPU alone, for on a GPU that would wait for it.
    """
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 of shape (batch, length), got {ids.dtype} of {tuple(ids.shape)}")
    if ids.device != device:
        raise ValueError(f"ids are on {ids.device} but the model is on {device}: move one of them")
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"ids must lie in [0, {vocab_size}), got {low} to {high}; was the text encoded with another tokenizer?"
            )


def check_targets(ids: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Refuse what tokens cannot be to predict; on a GPU values are not read.

    Raises:
        ValueError: another dtype than int64 or shape than that of ids, targets beyond the vocabulary, or none.
    """
    if targets.shape != ids.shape or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of the shape of ids, {tuple(ids.shape)}, got {targets.dtype} of "
            f"{tuple(targets.shape)}"
        )
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        predicted = targets[targets != NO_TARGET]
        if predicted.numel() == 0:
            raise ValueError(f"nothing is to be predicted: all targets are {NO_TARGET}")
        if predicted.min() < 0 or predicted.max() >= vocab_size:
            raise ValueError(
                f"targets must be {NO_TARGET} or lie in [0, {vocab_size}), got {int(predicted.min())} to "
                f"{int(predicted.max())}"
            )


def positions_of(ids: Tensor, key_mask: Tensor | None) -> Tensor:
    """(length,) positions, or (batch, length) where padding makes rows differ: they count from the first real token."""
    if key_mask is None:
        return torch.arange(ids.shape[-1], device=ids.device)
    start = torch.zeros(ids.shape[0], dtype=torch.int64, device="cpu")
    positions, _ = advance_positions(start, ids.shape[1], key_mask)
    return positions.to(ids.device)
