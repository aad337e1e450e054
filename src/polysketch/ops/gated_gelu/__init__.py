"""The middle of a gated linear unit, gelu(gate) * up, in one pass."""

from polysketch.ops.gated_gelu.api import gated_gelu, gated_gelu_backend

__all__ = ["gated_gelu", "gated_gelu_backend"]
