"""What the attention of a model is given, layer by layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["AttentionInputs", "attention_inputs"]

GIVEN = ("hidden", "unrotated")  # what a mechanism may read beside query, key and value: `reads_hidden` says so


class AttentionInputs(NamedTuple):
    """What one layer's mechanism sees.

    Attributes:
        query: (batch, num_heads, length, head_dim), rotated.
        key: (batch, num_kv_heads, length, head_dim), rotated.
        value: (batch, num_kv_heads, length, value_dim).
        given: what else the mechanism takes: `hidden`, the layer's input, and `unrotated`, query and key before rotary
            positions, where it reads them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    given: dict[str, Any]


def attention_inputs(model: TransformerLM, ids: Tensor) -> list[AttentionInputs]:
    """Run the model on tokens and keep every layer's queries, keys and values; no gradient.

    Args:
        model: any language model of ours; its training mode is restored.
        ids: (batch, length) int64, on any device.

    Returns:
        One for each layer, from the first on, on the model's device.
    """
    found: list[AttentionInputs] = []

    def keep(mechanism: Any, tensors: tuple[Any, ...], named: dict[str, Any]) -> None:
        query, key, value = (tensor.clone() for tensor in tensors[:3])
        given = {name: _copied(named[name]) for name in GIVEN if getattr(mechanism, f"reads_{name}")}
        found.append(AttentionInputs(query, key, value, given))

    device = next(model.parameters()).device
    mechanisms: list[Any] = [block.attention.mechanism for block in model.blocks]  # type: ignore[union-attr]
    handles = [mechanism.register_forward_pre_hook(keep, with_kwargs=True) for mechanism in mechanisms]
    try:
        with evaluation_mode(model), torch.no_grad():  # usable in training afterwards
            model.hidden_states(ids.to(device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copied(given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tuple(x.clone() for x in given) if isinstance(given, tuple) else given.clone()
