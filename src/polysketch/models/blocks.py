"""The blocks that a configuration asks for."""

from typing import Any

from polysketch.models.config import ModelConfig
from polysketch.models.layers import WINDOWS
from polysketch.nn import TransformerBlock, build_mixer


def build_block(config: ModelConfig, name: str, options: dict[str, Any]) -> TransformerBlock:
    """A block whose layer is called `name` and has these options; everything else is as in the configuration."""
    mixer = build_mixer(
        name,
        options,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        projection_convolution=config.projection_convolution,
        query_key_norm=config.query_key_norm,
        head_gate=config.head_gate,
        among_windows=any(layer == WINDOWS for layer, _ in config.layers()),
    )
    return TransformerBlock(
        config.hidden_size,
        mixer,
        feedforward_size=config.feedforward_size,
        norm_epsilon=config.norm_epsilon,
        rotary=config.rotates(name),
    )
