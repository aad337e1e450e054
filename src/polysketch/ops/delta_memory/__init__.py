"""A memory addressed by products of two sparse vectors and written by the delta rule."""

from polysketch.ops.delta_memory.api import (
    delta_memory,
    delta_memory_after,
    delta_memory_backend,
    delta_memory_extend_,
)
from polysketch.ops.delta_memory.state import DeltaMemoryState

__all__ = ["DeltaMemoryState", "delta_memory", "delta_memory_after", "delta_memory_backend", "delta_memory_extend_"]
