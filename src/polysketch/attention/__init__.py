"""Mechanisms: (query, key, value) -> output, for training and decoding in one class each.

`build(name, num_heads=..., head_dim=..., **options)` makes one by name; `MECHANISMS` lists them. To add one: a file
with a subclass of `Mechanism`, and its line in `registry.py`; the contract tests then run on it. The classes that the
table lists are names of this package too.
"""

from polysketch.attention.base import Mechanism
from polysketch.attention.convolved import ConvolvedState
from polysketch.attention.heavy_state import HeavyState
from polysketch.attention.key_value_state import KeyValueState
from polysketch.attention.linearized import LinearizedAttention
from polysketch.attention.positions import advance_positions
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.registry import *  # noqa: F403  the class of every mechanism
from polysketch.attention.registry import MECHANISMS, build, check_options, mechanism_class, option_names

__all__ = [
    "MECHANISMS",
    "ConvolvedState",
    "HeavyState",
    "KeyValueState",
    "LinearizedAttention",
    "Mechanism",
    "RecentTokens",
    "advance_positions",
    "build",
    "check_options",
    "mechanism_class",
    "option_names",
]
__all__ += [kind.__name__ for kind in MECHANISMS.values()]
