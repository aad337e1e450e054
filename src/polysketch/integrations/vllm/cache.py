"""Where in vLLM's cache the states of a layer are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from polysketch.integrations.vllm import BACKEND
from polysketch.integrations.vllm.rows import Rows
from polysketch.integrations.vllm.slots import StateSlots


class StateCache(MambaBase):
    """The states of one layer, a page for each request.

    Args:
        name: by which vLLM knows the layer; the layer's number stands in it.
        slots: that read and write the states.
        page_bytes: of a page, the same for all layers of a model; at least as many as this layer needs.
    """

    def __init__(self, name: str, slots: StateSlots, page_bytes: int) -> None:
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"expected one layer of the name {name}, found a second")
        layers[name] = self
        self.name, self.slots, self.page_bytes = name, slots, page_bytes
        self.kv_cache: tuple[Tensor, ...] = ()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Keep the states in these (pages, 1, 1, bytes) from now on."""
        self.kv_cache = (kv_cache.squeeze(dim=(1, 2)).view(torch.uint8),)
        self.slots.bind(self.kv_cache[0])

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """A page, in bytes."""
        return ((self.page_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of what `get_state_shape` counts."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The name of `StateBackend`."""
        return MambaAttentionBackendEnum[BACKEND]

    def rows(self) -> list[Rows] | None:
        """The requests of the step that runs now; None in a run that only measures memory."""
        metadata: Any = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.name].rows
