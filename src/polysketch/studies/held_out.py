"""What a trained form is judged by: its losses apart by repeats, and where its windows' chunks begin."""

from typing import Any

import numpy as np
import torch

from polysketch.data import PreparedData
from polysketch.models import TransformerLM
from polysketch.studies.repeats import Repeat, distances, repeats

_AT_ONCE = 8
_RANGES = 16


def losses(model: TransformerLM, windows: np.ndarray) -> np.ndarray:
    """Loss in nats of every prediction: (rows, length) for (rows, length + 1) tokens."""
    found = []
    with torch.inference_mode():
        for rows in np.array_split(windows, max(1, len(windows) // _AT_ONCE)):
            ids = _ids(rows, model)
            found.append(model.token_losses(model.hidden_states(ids[:, :-1]), ids[:, 1:]).cpu().numpy())
    return np.concatenate(found)


def _ids(windows: np.ndarray, model: TransformerLM) -> torch.Tensor:
    return torch.from_numpy(windows.astype(np.int64)).to(model.embedding.weight.device)


def held_out_windows(data: PreparedData, context: int, rows: int) -> np.ndarray:
    """(rows, context + 1) tokens of the test split, spread over it evenly: the same for every model."""
    tokens, length = data.split("test").tokens, context + 1
    if len(tokens) < length:
        raise ValueError(f"expected a test split of at least a row of {length} tokens, found {len(tokens)}")
    starts = np.linspace(0, len(tokens) - length, rows).astype(np.int64)
    return np.stack([tokens[start : start + length] for start in starts])


def measures(model: TransformerLM, windows: np.ndarray, window: int) -> dict[str, Any]:
    """Losses in nats a token, with and without what lies beyond the window where a form can leave it out.

    Args:
        model: a language model, whose prefix is removed in the end.
        windows: of `held_out_windows`.
        window: tokens with exact weights.

    Returns:
        `loss` of all predictions, `new`, `near` and `far` of those beyond the first two windows by `Repeat` (near is
        within two windows), `counts` of them, `chunk_start`: how much worse the first four tokens of aligned chunks of
        the window's size are than all tokens; `shares` by layer and head, and `far_without` and `loss_without`;
        `position_edges` and `loss_by_position`, see `by_position`; `distances` and `loss_by_distance`, see
        `by_distance`.
    """
    every = losses(model, windows)
    found = {**_told_apart(every, windows, window), **by_position(every), **by_distance(every, windows)}
    if not model.prefix_shares(_ids(windows[:1, :-1], model)):
        return found
    some = _ids(windows[:4, :-1], model)
    shares = {str(layer): heads.tolist() for layer, heads in model.prefix_shares(some).items()}
    model.remove_prefix()
    without = _told_apart(losses(model, windows), windows, window)
    return {**found, "shares": shares, "loss_without": without["loss"], "far_without": without["far"]}


def by_position(found: np.ndarray) -> dict[str, list[float]]:
    """Mean losses of equal ranges of positions.

    Args:
        found: (rows, length) losses.

    Returns:
        `position_edges`, one more than ranges, and `loss_by_position`: 16 of them, fewer of fewer positions.
    """
    length = found.shape[1]
    edges = np.linspace(0, length, min(_RANGES, length) + 1).astype(np.int64)
    sums = np.add.reduceat(found.mean(axis=0, dtype=np.float64), edges[:-1])
    return {"position_edges": edges.tolist(), "loss_by_position": (sums / np.diff(edges)).tolist()}


def by_distance(found: np.ndarray, windows: np.ndarray) -> dict[str, list[Any]]:
    """Mean losses of tokens that end a pair which occurred before, by how long before.

    Args:
        found: (rows, length) losses.
        windows: (rows, length + 1) tokens.

    Returns:
        `distances` of 1, 2, 4, ... tokens, the last not shorter than any that occurs; and `loss_by_distance` of tokens
        that far or less from the same pair, and further than the distance before. None where there are none.
    """
    ago = distances(windows)
    ends = 2 ** np.arange(1 + int(np.ceil(np.log2(max(1, ago.max())))))
    masks = [(ago > end // 2) & (ago <= end) for end in ends]
    means = [float(found[mask].mean()) if mask.any() else None for mask in masks]
    return {"distances": ends.tolist(), "loss_by_distance": means}


def _told_apart(found: np.ndarray, windows: np.ndarray, window: int) -> dict[str, Any]:
    late = np.arange(found.shape[1]) >= 2 * window
    kinds = repeats(windows, 2 * window)
    masks = {kind.name.lower(): (kinds == kind) & late for kind in Repeat}
    starts = late & (np.arange(found.shape[1]) % window < min(4, window))
    return {
        "loss": float(found.mean()),
        **{name: float(found[mask].mean()) if mask.any() else None for name, mask in masks.items()},
        "counts": {name: int(mask.sum()) for name, mask in masks.items()},
        "chunk_start": float(found[:, starts].mean() - found[:, late].mean()),
    }
