"""A `TransformerLM` as vLLM runs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching

from polysketch.integrations.vllm.cache import StateCache
from polysketch.integrations.vllm.layers import Layer, SoftmaxLayer, StateLayer, run_step
from polysketch.integrations.vllm.pages import SOFTMAX, in_float32, page_bytes, slots_of
from polysketch.integrations.vllm.slots import StateSlots
from polysketch.models import ModelConfig, TransformerLM

_SAVED_UNDER = "model.transformer."
"""Before our own name of every weight in an exported folder."""


class PolysketchForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """An exported model: layers with states of constant size, and softmax layers.

    Args:
        vllm_config: everything that vLLM knows.
        prefix: of the names of layers.

    Raises:
        ValueError: several devices for one model, or a layer whose state grows and that is not softmax.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _refuse_several_devices(vllm_config)
        config = _config(vllm_config)
        with in_float32():
            self.transformer = TransformerLM(config).eval()
        self.transformer.to(vllm_config.model_config.dtype)
        blocks: list[Any] = self.transformer.all_blocks
        names = [name for name, _ in config.layers()]
        slots = [slots_of(name, block) for name, block in zip(names, blocks, strict=True)]
        caches = _caches(f"{prefix}layers", slots)
        self.attentions = nn.ModuleDict()
        self.layers: list[Layer] = []
        for index, (name, block) in enumerate(zip(names, blocks, strict=True)):
            if name != SOFTMAX:
                self.layers.append(StateLayer(block, caches[index].slots, caches[index].rows))
                continue
            attend = _attention(config, vllm_config, f"{prefix}layers.{index}.attention")
            self.attentions[str(index)] = attend
            cache = caches.get(index)
            self.layers.append(
                SoftmaxLayer(block, attend, cache and cache.slots, (lambda: None) if cache is None else cache.rows)
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(tokens,) ids -> (tokens, hidden_size), without positions; `forward` has them."""
        return self.transformer.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """One step of the requests that vLLM has chosen.

        Args:
            input_ids: (tokens,), the new ones of each request, one request after the other.
            positions: (tokens,) int64, of each token in its request.
            intermediate_tensors, inputs_embeds: None; these models take ids.

        Returns:
            (tokens, hidden_size) after the final norm.
        """
        return run_step(self.transformer, self.layers, input_ids.long(), positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(tokens, hidden_size) from `forward` -> (tokens, vocab_size)."""
        return self.transformer.logits(hidden_states)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the weights of an exported folder, by name.

        Returns:
            The names of all that were set.

        Raises:
            ValueError: a name or a shape that the model does not have, or weights of the model that were not given.
        """
        own, given = self.transformer.state_dict(), set()
        for saved, tensor in weights:
            name = saved.removeprefix(_SAVED_UNDER)
            if name not in own or own[name].shape != tensor.shape:
                expected = tuple(own[name].shape) if name in own else "no such weight"
                raise ValueError(f"{saved}: expected {expected}, found {tuple(tensor.shape)}")
            own[name].copy_(tensor)
            given.add(name)
        if missing := sorted(own.keys() - given):
            raise ValueError(f"expected all {len(own)} weights of the model, found none for {', '.join(missing[:3])}")
        return {f"transformer.{name}" for name in given}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """A page, in bytes: the largest state of all layers."""
        return ((page_bytes(_config(vllm_config), vllm_config.model_config.dtype),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Of what the shape counts."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A page is copied whole."""
        return (get_temporal_copy_spec,)


def _caches(names: str, slots: list[StateSlots | None]) -> dict[int, StateCache]:
    """By the number of each layer that has slots, their place in vLLM's cache; all pages are of one size."""
    page_bytes = max((each.layout.nbytes for each in slots if each is not None), default=0)
    return {
        index: StateCache(f"{names}.{index}.state", each, page_bytes)
        for index, each in enumerate(slots)
        if each is not None
    }


def _attention(config: ModelConfig, vllm_config: VllmConfig, name: str) -> Attention:
    """vLLM's softmax attention."""
    return Attention(
        config.num_heads,
        config.head_dim,
        config.head_dim**-0.5,
        config.num_kv_heads,
        cache_config=vllm_config.cache_config,
        prefix=name,
    )


def _config(vllm_config: VllmConfig) -> ModelConfig:
    return vllm_config.model_config.hf_config.to_model_config()


def _refuse_several_devices(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if sizes != (1, 1):
        raise ValueError(
            f"expected a model on one device, found tensor_parallel_size and pipeline_parallel_size {sizes}: "
            "run several servers, or take data_parallel_size"
        )
