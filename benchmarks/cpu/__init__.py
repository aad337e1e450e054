"""Sections of `python -m benchmarks`: attention, training, decoding, memory, generation; targets beside them."""
