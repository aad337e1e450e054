"""Attention over features: `linear_attention` and its state."""

from polysketch.ops.linear.api import (
    linear_attention,
    linear_attention_backend,
    linear_attention_sums,
    lower_triangular_multiply,
)
from polysketch.ops.linear.decode import linear_attention_extend_
from polysketch.ops.linear.gradients import ask_programs_of_gradients, linear_attention_gradients
from polysketch.ops.linear.state import LinearAttentionState, combine
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial

__all__ = [
    "LinearAttentionResult",
    "LinearAttentionState",
    "LocalPolynomial",
    "StateRows",
    "ask_programs_of_gradients",
    "combine",
    "linear_attention",
    "linear_attention_backend",
    "linear_attention_extend_",
    "linear_attention_gradients",
    "linear_attention_sums",
    "lower_triangular_multiply",
]
