"""Mechanisms: (query, key, value) -> output, for training and decoding in one class each.

`build(name, num_heads=..., head_dim=..., **options)` makes one by name; `MECHANISMS` lists them. To add one: a file
with a subclass of `Mechanism`, and a line in `registry.py`; the contract tests then run on it.
"""

from polysketch.attention.base import Mechanism
from polysketch.attention.key_value_state import KeyValueState
from polysketch.attention.linear import LinearAttention
from polysketch.attention.performer import PerformerAttention
from polysketch.attention.polynomial import PolynomialAttention
from polysketch.attention.polysketch import PolysketchAttention
from polysketch.attention.positions import advance_positions
from polysketch.attention.registry import MECHANISMS, build, check_options, mechanism_class, option_names
from polysketch.attention.softmax import SoftmaxAttention

__all__ = [
    "MECHANISMS",
    "KeyValueState",
    "LinearAttention",
    "Mechanism",
    "PerformerAttention",
    "PolynomialAttention",
    "PolysketchAttention",
    "SoftmaxAttention",
    "advance_positions",
    "build",
    "check_options",
    "mechanism_class",
    "option_names",
]
