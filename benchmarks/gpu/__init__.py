"""Sections of `gpu_check`: attention, training steps, decoding."""
