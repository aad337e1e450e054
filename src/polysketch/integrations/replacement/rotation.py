"""Queries and keys as they were before rotary positions: turned back by the architecture's own rotation.

No place in transformers' layers is the same in all architectures and comes before rotary positions but behind norms.
So rotated vectors are turned back: by the function that turned them, with the same cosines and with sines of the other
sign. Whether that is right for a layer is tried out when its attention is replaced (`look_at_layers`).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Rotate = Callable[..., tuple[Tensor, Tensor]]


def turned_back(layer: nn.Module, query: Tensor, key: Tensor, positions: Any) -> tuple[Tensor, Tensor] | None:
    """Query and key as they were before rotary positions, within rounding; None where they cannot be known.

    Cost: one more rotation, in float32.

    Args:
        layer: the attention layer.
        query, key: (batch, heads, new tokens, head_dim), rotated.
        positions: as `LayerInputs.positions` has them.
    """
    rotate = _own_rotation(layer)
    if rotate is None or not _are_angles(positions):
        return None
    cosine, sine = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in positions)
    squares = cosine.square() + sine.square()  # not one where the architecture scales what it turns, as YaRN does
    width = cosine.shape[-1]
    starts = (x[..., :width].to(torch.promote_types(x.dtype, cosine.dtype)) for x in (query, key))
    of_query, of_key = rotate(*starts, cosine / squares, -sine / squares)
    return _joined(of_query, query[..., width:]), _joined(of_key, key[..., width:])


def _joined(start: Tensor, rest: Tensor) -> Tensor:
    """Whole heads, in the dtype of the rest, which rotary positions do not turn."""
    start = start.to(rest.dtype)
    return torch.cat([start, rest], -1) if rest.shape[-1] else start


def _own_rotation(layer: nn.Module) -> Rotate | None:
    """The function by which the layer's code turns queries and keys; None where there is none of the known form."""
    namespace = inspect.unwrap(type(layer).forward).__globals__
    function: Rotate | None = namespace.get("apply_rotary_pos_emb")
    if function is None or list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    return function


def _are_angles(positions: Any) -> bool:
    """Whether they are a cosine and a sine for each token."""
    pair = isinstance(positions, tuple | list) and len(positions) == 2
    return pair and all(isinstance(each, Tensor) and each.dim() == 3 for each in positions)
