"""What vLLM has to be told of a configuration before it makes a model."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from polysketch.integrations.vllm.pages import SOFTMAX
from polysketch.models import ModelConfig

LONGEST = 131_072
"""Tokens of a text where the user does not say. States have no longest text; vLLM sets memory aside for its ids."""


class Settings(VerifyAndUpdateConfig):
    """Called by vLLM for every exported model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Let a model without states be an ordinary one for vLLM, and one of states alone have long texts."""
        config = model_config.hf_config.to_model_config()
        if not has_states(config):
            model_config.hf_config.layer_types = ["full_attention"] * config.num_layers
        elif model_config.original_max_model_len is None and not has_softmax(config):
            model_config.max_model_len = LONGEST


def has_softmax(config: ModelConfig) -> bool:
    """Whether keys and values are kept, which grow."""
    return any(name == SOFTMAX for name, _ in config.layers())


def has_states(config: ModelConfig) -> bool:
    """Whether any layer has a state: a mechanism's, or that of a convolution of projections."""
    return config.projection_convolution > 0 or any(name != SOFTMAX for name, _ in config.layers())
