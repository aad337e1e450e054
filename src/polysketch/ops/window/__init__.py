"""Softmax attention to nearby tokens only, in linear time: a sliding window."""

from polysketch.ops.window.api import (
    BACKENDS,
    sliding_window_attention,
    sliding_window_attention_backend,
    sliding_window_attention_with_cache,
)
from polysketch.ops.window.types import BesideKey

__all__ = [
    "BACKENDS",
    "BesideKey",
    "sliding_window_attention",
    "sliding_window_attention_backend",
    "sliding_window_attention_with_cache",
]
