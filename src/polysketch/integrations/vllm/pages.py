"""How large the pages of a model's states are; known without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polysketch.integrations.vllm.layers import state_slots, tail_slots
from polysketch.integrations.vllm.slots import StateSlots
from polysketch.models import ModelConfig
from polysketch.models.blocks import build_block
from polysketch.nn import TransformerBlock

SOFTMAX = "softmax"
"""The mechanism whose keys and values vLLM keeps by itself."""


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a page: the largest state of all layers, for all pages are of one size. 0 where no layer has a state.

    Args:
        config: of the model. One layer of each kind is built, with weights that nobody needs.
        dtype: that the model is served in.
    """
    sizes = [0]
    for name, options in _distinct(config.layers()):
        with in_float32(), torch.device("cpu"):
            block = build_block(config, name, options)
        slots = slots_of(name, block.to(dtype))
        sizes.append(0 if slots is None else slots.layout.nbytes)
    return max(sizes)


def pages_of_request(config: ModelConfig) -> int:
    """Pages of one request: one in every layer that has a state."""
    layers = config.layers()
    return len(layers) if config.projection_convolution > 0 else sum(name != SOFTMAX for name, _ in layers)


def slots_of(name: str, block: TransformerBlock) -> StateSlots | None:
    """Where a block keeps its states; None for one that has keys and values alone."""
    if name == SOFTMAX:
        convolution: Any = block.attention.convolution
        return None if convolution is None else tail_slots(convolution)
    try:
        return state_slots(block)
    except ValueError as error:
        raise ValueError(f"layers of {name} cannot be served: {error}") from None


def _distinct(layers: list[Any]) -> list[Any]:
    """Each layer that is unlike those before it."""
    return [layer for index, layer in enumerate(layers) if layer not in layers[:index]]


@contextmanager
def in_float32() -> Iterator[None]:
    """Build in float32, as in training: buffers are then rounded once, when the model is cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
