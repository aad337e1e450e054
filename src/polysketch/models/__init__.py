"""Models made of the parts: configuration, presets, and the decoder-only language model."""

from typing import TYPE_CHECKING

from polysketch.lazy import on_demand
from polysketch.models.presets import PRESETS, preset, preset_attention, preset_fields

if TYPE_CHECKING:
    from polysketch.models.config import ModelConfig
    from polysketch.models.cross_entropy import IGNORED_TARGET, token_losses
    from polysketch.models.state import ModelState
    from polysketch.models.transformer_lm import TransformerLM
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "config": ["ModelConfig"],
            "cross_entropy": ["IGNORED_TARGET", "token_losses"],
            "state": ["ModelState"],
            "transformer_lm": ["TransformerLM"],
        },
    )

__all__ = [
    "IGNORED_TARGET",
    "PRESETS",
    "ModelConfig",
    "ModelState",
    "TransformerLM",
    "preset",
    "preset_attention",
    "preset_fields",
    "token_losses",
]
