"""HyperAttention (arXiv:2310.05869): softmax attention to the largest entries exactly, to the others by sampling."""

from polysketch.ops.hyper.hashing import gray_rank, hash_codes

__all__ = ["gray_rank", "hash_codes"]
