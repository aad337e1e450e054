"""Models made of the parts: configuration, presets, and the decoder-only language model."""

from polysketch.models.config import ModelConfig
from polysketch.models.cross_entropy import IGNORED_TARGET, token_losses
from polysketch.models.presets import PRESETS, preset, preset_attention
from polysketch.models.state import ModelState
from polysketch.models.transformer_lm import TransformerLM

__all__ = [
    "IGNORED_TARGET",
    "PRESETS",
    "ModelConfig",
    "ModelState",
    "TransformerLM",
    "preset",
    "preset_attention",
    "token_losses",
]
