"""The delta rule: what tokens add to sums, so that these answer each key with its value."""

from polysketch.ops.delta.api import delta_attention, delta_attention_extend_, delta_writes, delta_writes_backend

__all__ = ["delta_attention", "delta_attention_extend_", "delta_writes", "delta_writes_backend"]
