"""What is computed: parameter-free functions on tensors (batch, heads, length, width)."""

from polysketch.ops.convolution import causal_convolution, centred_convolution, depthwise_convolution_2d
from polysketch.ops.delta import delta_attention, delta_attention_extend_, delta_writes, delta_writes_backend
from polysketch.ops.hadamard import hadamard_transform
from polysketch.ops.heavy import heavy_correction, line_codes
from polysketch.ops.hyper import gray_rank, hash_codes, hyper_attention
from polysketch.ops.landmark import nystrom_attention, skyformer_attention
from polysketch.ops.linear import (
    LinearAttentionResult,
    LinearAttentionState,
    LocalPolynomial,
    StateRows,
    combine,
    linear_attention,
    linear_attention_backend,
    linear_attention_extend_,
    linear_attention_sums,
    lower_triangular_multiply,
)
from polysketch.ops.local import OpenChunk, local_attention
from polysketch.ops.packed import DocumentGroup, PackedDocuments
from polysketch.ops.polynomial import (
    polynomial_attention,
    polynomial_attention_backend,
    polynomial_attention_with_cache,
    squared_polynomial_attention,
    squared_polynomial_attention_with_cache,
)
from polysketch.ops.softmax import softmax_attention, softmax_attention_with_cache
from polysketch.ops.window import (
    BesideKey,
    sliding_window_attention,
    sliding_window_attention_backend,
    sliding_window_attention_with_cache,
)

__all__ = [
    "BesideKey",
    "DocumentGroup",
    "LinearAttentionResult",
    "LinearAttentionState",
    "LocalPolynomial",
    "OpenChunk",
    "PackedDocuments",
    "StateRows",
    "causal_convolution",
    "centred_convolution",
    "combine",
    "delta_attention",
    "delta_attention_extend_",
    "delta_writes",
    "delta_writes_backend",
    "depthwise_convolution_2d",
    "gray_rank",
    "hadamard_transform",
    "hash_codes",
    "heavy_correction",
    "hyper_attention",
    "line_codes",
    "linear_attention",
    "linear_attention_backend",
    "linear_attention_extend_",
    "linear_attention_sums",
    "local_attention",
    "lower_triangular_multiply",
    "nystrom_attention",
    "polynomial_attention",
    "polynomial_attention_backend",
    "polynomial_attention_with_cache",
    "skyformer_attention",
    "sliding_window_attention",
    "sliding_window_attention_backend",
    "sliding_window_attention_with_cache",
    "softmax_attention",
    "softmax_attention_with_cache",
    "squared_polynomial_attention",
    "squared_polynomial_attention_with_cache",
]
