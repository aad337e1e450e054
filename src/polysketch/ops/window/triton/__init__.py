"""Attention within a window as programs for CUDA devices."""

from polysketch.ops.window.triton.one import attend_one, why_not

__all__ = ["attend_one", "why_not"]
