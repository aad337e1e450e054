"""`heavy_correction`: what exact weights of a few keys of the same bucket add to sketched ones."""

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_attention_tensors
from polysketch.ops.heavy.correction import heavy_correction_operator


def heavy_correction(
    query: Tensor,
    key: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    query_codes: Tensor,
    key_codes: Tensor,
    before: Tensor,
    after: Tensor | None = None,
    degree: int = 4,
    size: int = 64,
) -> Tensor:
    """The sums that turn sketched weights of each query's candidates into exact ones.

        c_i = sum over j in C_i of ((q_i . k_j)^degree - (phi(q_i) . phi(k_j))^2) v_j

    C_i are the last `size` keys j < before_i of the bucket of query i, and the first `size` keys j >= after_i of it.
    Added to the numerator of attention with sketched weights, c_i makes the candidates' weights exact; of a value of
    one it is what the denominator needs. The keys of a bucket come in the order of their indices.

    Args:
        query: (batch, heads, queries, head_dim), of the exact weights; floating point, as all but codes and edges.
        key: (batch, key_heads, keys, head_dim); heads is a multiple of key_heads (grouped-query attention).
        query_features: (batch, heads, queries, r).
        key_features: (batch, key_heads, keys, r).
        value: (batch, key_heads, keys, value_dim).
        query_codes: (batch, heads, queries) int64 buckets, of `line_codes` for instance.
        key_codes: (batch, key_heads, keys) int64 buckets; below zero for a key that is nobody's candidate.
        before: (batch, queries) int64 key index, from 0 to keys.
        after: the same, not below `before`; None where nothing later is a candidate.
        degree: even, at least 2.
        size: candidates on a side at most.

    Returns:
        (batch, heads, queries, value_dim), float32, or float64 for float64 values; also under autocast, which does not
        touch this op. Differentiable once in all but codes and edges.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, with what was expected and what came.

    Cost: sorting queries and keys by bucket, and 2 (head_dim + r + value_dim) operations for each of at most about
    queries * (size + 64) + 64 * keys pairs, a key head; the backward pass about three times that. Weights exist for
    a few tiles at a time.
    """
    check_attention_tensors(query, key, value)
    check_attention_tensors(query_features, key_features, value)
    if query.shape[:3] != query_features.shape[:3]:
        raise ValueError(
            "query and query_features must agree in batch, heads and length, got "
            f"{tuple(query.shape)} and {tuple(query_features.shape)}"
        )
    check_at_least_one(degree=degree, size=size)
    if degree % 2:
        raise ValueError(f"degree must be even and at least 2, got {degree}")
    edges = (query.shape[0], query.shape[2])
    _expect("query_codes", query_codes, tuple(query.shape[:3]))
    _expect("key_codes", key_codes, tuple(key.shape[:3]))
    _expect("before", before, edges)
    _expect_edges("before", before, 0, key.shape[2])
    if after is not None:
        _expect("after", after, edges)
        _expect_edges("after", after, before, key.shape[2])
    return heavy_correction_operator(
        query, key, query_features, key_features, value, query_codes, key_codes, before, after, degree, size
    )


def _expect_edges(name: str, edge: Tensor, least: Tensor | int, most: int) -> None:
    if edge.device.type != "cpu" or torch.compiler.is_compiling():  # a device is not waited for
        return
    if bool(((edge < least) | (edge > most)).any()):
        least_of_all = "0" if isinstance(least, int) else "before"
        raise ValueError(f"{name} must be from {least_of_all} to {most}, the number of keys, got {edge.tolist()[:8]}")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.is_floating_point() or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be whole numbers {shape}, got {tuple(tensor.shape)} of {tensor.dtype}")
