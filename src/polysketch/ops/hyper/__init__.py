"""HyperAttention (arXiv:2310.05869): softmax attention to the largest entries exactly, to the others by sampling."""

from polysketch.ops.hyper.api import check_options, hyper_attention
from polysketch.ops.hyper.capping import check_capping
from polysketch.ops.hyper.sort_lsh import check_hyperplanes, gray_rank, hash_codes

__all__ = ["check_capping", "check_hyperplanes", "check_options", "gray_rank", "hash_codes", "hyper_attention"]
