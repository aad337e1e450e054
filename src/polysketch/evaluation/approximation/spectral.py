"""HyperAttention's measures: the error of an output in the operator norm (Theorem 1), and alpha (Lemma 1)."""

import torch
from torch import Tensor

__all__ = ["column_alpha", "operator_norm", "operator_norm_error"]


def operator_norm(matrix: Tensor) -> Tensor:
    """The largest singular value: (..., rows, columns) -> (...,) float64."""
    return torch.linalg.matrix_norm(matrix.double(), ord=2)


def operator_norm_error(approximated: Tensor, exact: Tensor, weights: Tensor, value: Tensor) -> Tensor:
    """The epsilon of HyperAttention, Theorem 1: |Att - approx|_op / (|D^-1 A|_op |V|_op).

    Args:
        approximated, exact: outputs (..., queries, value_dim).
        weights: D^-1 A, the exact normalised weights, (..., queries, keys).
        value: (..., keys, value_dim).

    Returns:
        (...,) float64.

    Cost: singular values of a queries x keys matrix.
    """
    difference = operator_norm(approximated.double() - exact.double())
    return difference / (operator_norm(weights) * operator_norm(value))


def column_alpha(weights: Tensor, *, skip_columns: int = 0, times_length: bool = True) -> Tensor:
    """alpha = n max_i |D^-1 A e_i|^2: how unevenly normalised attention falls on the keys (HyperAttention, Lemma 1).

    1 where all weights are equal; n^2 where every query attends to the same key alone. The paper needs it small
    against n. Its section 4.3 plots it without the factor n, and for language models without the first 32 columns,
    which hold attention sinks.

    Args:
        weights: D^-1 A, (..., queries, keys); n is the number of queries.
        skip_columns: keys at the start that are left out.
        times_length: multiply by n.

    Returns:
        (...,) float64.

    Raises:
        ValueError: no column is left.
    """
    if not 0 <= skip_columns < weights.shape[-1]:
        raise ValueError(f"expected skip_columns from 0 to {weights.shape[-1] - 1}, found {skip_columns}")
    largest = weights[..., skip_columns:].double().square().sum(-2).amax(-1)
    return largest * weights.shape[-2] if times_length else largest
