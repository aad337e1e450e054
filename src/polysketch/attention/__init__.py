"""Mechanisms: (query, key, value) -> output, for training and decoding in one class each.

`build(name, num_heads=..., head_dim=..., **options)` makes one by name; `MECHANISMS` lists them. To add one: a file
with a subclass of `Mechanism`, and a line in `registry.py`; the contract tests then run on it.
"""

from polysketch.attention.base import Mechanism
from polysketch.attention.based import BasedAttention
from polysketch.attention.convolved_state import ConvolvedState
from polysketch.attention.focused import FocusedAttention
from polysketch.attention.heavy_state import HeavyState
from polysketch.attention.hedgehog import HedgehogAttention
from polysketch.attention.hyper import HyperAttention
from polysketch.attention.key_value_state import KeyValueState
from polysketch.attention.landmark import NystromAttention, SkyformerAttention
from polysketch.attention.linear import LinearAttention
from polysketch.attention.linearized import LinearizedAttention
from polysketch.attention.llops import LlopsAttention
from polysketch.attention.local import LocalAttention
from polysketch.attention.performer import PerformerAttention
from polysketch.attention.polarity import PolarityAttention
from polysketch.attention.polynomial import PolynomialAttention
from polysketch.attention.polysketch import PolysketchAttention
from polysketch.attention.polysketch_heavy import PolysketchHeavyAttention
from polysketch.attention.positions import advance_positions
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.registry import MECHANISMS, build, check_options, mechanism_class, option_names
from polysketch.attention.sliding_window import SlidingWindowAttention
from polysketch.attention.softmax import SoftmaxAttention
from polysketch.attention.squared_polynomial import SquaredPolynomialAttention
from polysketch.attention.symmetric_power import SymmetricPowerAttention

__all__ = [
    "MECHANISMS",
    "BasedAttention",
    "ConvolvedState",
    "FocusedAttention",
    "HeavyState",
    "HedgehogAttention",
    "HyperAttention",
    "KeyValueState",
    "LinearAttention",
    "LinearizedAttention",
    "LlopsAttention",
    "LocalAttention",
    "Mechanism",
    "NystromAttention",
    "PerformerAttention",
    "PolarityAttention",
    "PolynomialAttention",
    "PolysketchAttention",
    "PolysketchHeavyAttention",
    "RecentTokens",
    "SkyformerAttention",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "SquaredPolynomialAttention",
    "SymmetricPowerAttention",
    "advance_positions",
    "build",
    "check_options",
    "mechanism_class",
    "option_names",
]
