"""The norm of queries and keys and their rotary positions, in one pass."""

from polysketch.ops.rotated_heads.api import programs_take, rotated_heads, rotated_heads_backend

__all__ = ["programs_take", "rotated_heads", "rotated_heads_backend"]
