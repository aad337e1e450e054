"""Layer norms of queries and keys, and their random sketch where a program makes both at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polysketch.feature_maps import RandomSketch
from polysketch.ops.head_sketch import head_sketch, head_sketch_backend, programs_take

_FEW_NUMBERS = 4096
Pair = tuple[Tensor, Tensor]
"""Of queries and of keys."""


def normed_heads(
    norms: tuple[nn.LayerNorm, nn.LayerNorm], heads: Pair, dtype: torch.dtype, sketch: RandomSketch | None
) -> tuple[Pair, Pair | None]:
    """Queries and keys after their norms, in `dtype`, and features of these; None where no program makes features.

    Args:
        norms: for queries and for keys.
        heads: (batch, heads, length, head_dim) each.
        dtype: of all that comes out.
        sketch: the map whose features are wanted; None for no features.
    """
    pairs = list(zip(norms, heads, strict=True))
    if all(_may_take(norm, x, dtype) for norm, x in pairs):
        # What a program makes of heads has their dtype.
        same = sketch is not None and all(x.dtype == dtype for x in heads)
        matrices = sketch.product_matrices(dtype) if sketch is not None and same else None
        for given in (None,) if matrices is None else (matrices, None):
            if all(programs_take(x, norm.weight, given, eps=norm.eps) for norm, x in pairs):
                return _by_programs(pairs, dtype, given)
    query, key = (normed(norm, x).to(dtype) for norm, x in pairs)
    return (query, key), None


def _may_take(norm: nn.LayerNorm, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether programs could compute what `normed` does: with weights of another dtype than x, rounded to `dtype`."""
    return head_sketch_backend(x, norm.weight) == "triton" and x.dtype in (dtype, norm.weight.dtype)


def _by_programs(
    pairs: Sequence[tuple[nn.LayerNorm, Tensor]], dtype: torch.dtype, matrices: Tensor | None
) -> tuple[Pair, Pair | None]:
    (query, of_query), (key, of_key) = (
        head_sketch(x, norm.weight, norm.bias, matrices, eps=norm.eps, backend="triton") for norm, x in pairs
    )
    features = None if of_query is None or of_key is None else (of_query, of_key)
    return (query.to(dtype), key.to(dtype)), features


def normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """norm(x); of few rows on a CPU in small operations, for PyTorch's own wakes a thread for each row.

    A thread that wakes takes longer than the rest of a decoding step together. Not in half precision, in which
    PyTorch's computes with float32 inside: a fourth power quadruples what small operations in half would lose.
    """
    if torch.compiler.is_exporting():  # one graph for few rows and many
        return norm(x)
    few = x.device.type == "cpu" and 0 < x.numel() <= _FEW_NUMBERS and x.dtype == norm.weight.dtype
    if not few or torch.is_grad_enabled() or torch.finfo(x.dtype).bits < 32:
        return norm(x)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(norm.bias, (x - mean).mul_(torch.rsqrt(variance + norm.eps)), norm.weight)
