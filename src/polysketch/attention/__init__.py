"""Mechanisms: (query, key, value) -> output, for training and decoding in one class each.

`build(name, num_heads=..., head_dim=..., **options)` makes one by name; `MECHANISMS` lists them. To add one: a file
with a subclass of `Mechanism`, and its line in `registry.py`; the contract tests then run on it. The classes that the
table lists are names of this package too; type checkers and the site have them from the imports below.
"""

from typing import TYPE_CHECKING

from polysketch.attention.abilities import mechanisms_that, mechanisms_that_cross
from polysketch.attention.registry import MECHANISMS, build, check_options, mechanism_class, option_names
from polysketch.lazy import on_demand

_CLASSES = MECHANISMS.to_load()

if TYPE_CHECKING:
    from polysketch.attention.base import Mechanism
    from polysketch.attention.based import BasedAttention as BasedAttention
    from polysketch.attention.convolved import ConvolvedState
    from polysketch.attention.focused import FocusedAttention as FocusedAttention
    from polysketch.attention.heavy_state import HeavyState
    from polysketch.attention.hedgehog import HedgehogAttention as HedgehogAttention
    from polysketch.attention.hyper import HyperAttention as HyperAttention
    from polysketch.attention.key_value_state import KeyValueRows, KeyValueState
    from polysketch.attention.landmark import NystromAttention as NystromAttention
    from polysketch.attention.landmark import SkyformerAttention as SkyformerAttention
    from polysketch.attention.linear import LinearAttention as LinearAttention
    from polysketch.attention.linearized import LinearizedAttention
    from polysketch.attention.llops import LlopsAttention as LlopsAttention
    from polysketch.attention.local import LocalAttention as LocalAttention
    from polysketch.attention.performer import PerformerAttention as PerformerAttention
    from polysketch.attention.polarity import PolarityAttention as PolarityAttention
    from polysketch.attention.polynomial import PolynomialAttention as PolynomialAttention
    from polysketch.attention.polysketch import PolysketchAttention as PolysketchAttention
    from polysketch.attention.polysketch_heavy import PolysketchHeavyAttention as PolysketchHeavyAttention
    from polysketch.attention.polysketch_paper import PolysketchPaperAttention as PolysketchPaperAttention
    from polysketch.attention.polysketch_window import PolysketchWindowAttention as PolysketchWindowAttention
    from polysketch.attention.positions import advance_positions
    from polysketch.attention.recent_tokens import RecentTokens
    from polysketch.attention.sliding_window import SlidingWindowAttention as SlidingWindowAttention
    from polysketch.attention.softmax import SoftmaxAttention as SoftmaxAttention
    from polysketch.attention.span_state import SpanState, add_spans
    from polysketch.attention.squared_polynomial import SquaredPolynomialAttention as SquaredPolynomialAttention
    from polysketch.attention.symmetric_power import SymmetricPowerAttention as SymmetricPowerAttention
    from polysketch.ops import PackedDocuments
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "base": ["Mechanism", "PackedDocuments"],
            "convolved": ["ConvolvedState"],
            "heavy_state": ["HeavyState"],
            "key_value_state": ["KeyValueRows", "KeyValueState"],
            "linearized": ["LinearizedAttention"],
            "positions": ["advance_positions"],
            "recent_tokens": ["RecentTokens"],
            "span_state": ["SpanState", "add_spans"],
            **_CLASSES,
        },
    )

__all__ = [
    "MECHANISMS",
    "ConvolvedState",
    "HeavyState",
    "KeyValueRows",
    "KeyValueState",
    "LinearizedAttention",
    "Mechanism",
    "PackedDocuments",
    "RecentTokens",
    "SpanState",
    "add_spans",
    "advance_positions",
    "build",
    "check_options",
    "mechanism_class",
    "mechanisms_that",
    "mechanisms_that_cross",
    "option_names",
]
__all__ += [name for names in _CLASSES.values() for name in names]
