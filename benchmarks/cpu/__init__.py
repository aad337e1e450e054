"""Sections of `python -m benchmarks`: forward and backward times, memory, generation."""
