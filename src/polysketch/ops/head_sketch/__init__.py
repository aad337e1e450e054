"""Layer norm over the width of heads, and the random sketch of what comes out, in one pass."""

from polysketch.ops.head_sketch.api import head_sketch, head_sketch_backend, programs_take

__all__ = ["head_sketch", "head_sketch_backend", "programs_take"]
