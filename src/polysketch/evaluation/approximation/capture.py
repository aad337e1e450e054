"""What the attention of a model is given, layer by layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["AttentionInputs", "attention_inputs"]


class AttentionInputs(NamedTuple):
    """What one layer's mechanism sees.

    Attributes:
        query: (batch, num_heads, length, head_dim), rotated.
        key: (batch, num_kv_heads, length, head_dim), rotated.
        value: (batch, num_kv_heads, length, value_dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor


def attention_inputs(model: TransformerLM, ids: Tensor) -> list[AttentionInputs]:
    """Run the model on tokens and keep every layer's queries, keys and values; no gradient.

    Args:
        model: any language model of ours; its training mode is restored.
        ids: (batch, length) int64, on any device.

    Returns:
        One for each layer, from the first on, on the model's device.
    """
    found: list[AttentionInputs] = []

    def keep(_: nn.Module, tensors: tuple[Any, ...]) -> None:
        found.append(AttentionInputs(*(tensor.clone() for tensor in tensors[:3])))

    device = next(model.parameters()).device
    handles = [block.attention.mechanism.register_forward_pre_hook(keep) for block in model.blocks]  # type: ignore[union-attr]
    try:
        with evaluation_mode(model), torch.no_grad():  # usable in training afterwards
            model.hidden_states(ids.to(device))
    finally:
        for handle in handles:
            handle.remove()
    return found
