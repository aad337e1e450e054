"""Sections of `python -m benchmarks`: attention, training, decoding, sums, memory, generation; targets beside them."""
