"""How far weights and outputs are from exact ones: in the Frobenius norm, pair by pair, and in the operator norm."""

import torch
from torch import Tensor

from polysketch.evaluation.approximation.weights import require_matrices

__all__ = [
    "column_alpha",
    "mean_absolute_error_ratio",
    "median_relative_error",
    "operator_norm",
    "operator_norm_error",
    "relative_frobenius_error",
    "relative_mean_absolute_error",
    "sketch_error",
]


def relative_frobenius_error(approximated: Tensor, exact: Tensor) -> Tensor:
    """|w~ - w|_F / |w|_F.

    Args:
        approximated, exact: (..., queries, keys).

    Returns:
        (...,) float64; 0 for equal weights, 1 for weights of zero.

    Raises:
        ValueError: the shapes differ.
    """
    _require_same_shape(approximated, exact)
    exact = exact.double()
    return (approximated.double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def sketch_error(approximated: Tensor, exact: Tensor, query: Tensor, key: Tensor, degree: int) -> Tensor:
    """The epsilon of PolySketchFormer, Theorem 1.1: |w~ - w|_F = epsilon sqrt(sum_ij |q_i|^2p |k_j|^2p).

    The bound is in the lengths of the vectors, not in the weights: where queries and keys are far from parallel it is
    much wider than the weights themselves. The theorem gives epsilon of the order sqrt(p / r).

    Args:
        approximated, exact: (..., queries, keys), of (q . k)^degree, not normalised.
        query, key: (..., queries, head_dim), (..., keys, head_dim).
        degree: p.

    Returns:
        (...,) float64.

    Raises:
        ValueError: the shapes of the weights differ, or a degree that no number of 64 bits holds.
    """
    _require_same_shape(approximated, exact)
    if not 0 <= degree < 2**31:
        raise ValueError(f"expected a degree of at least 0, found {degree}")
    lengths = [x.double().norm(dim=-1).pow(2 * degree).sum(-1) for x in (query, key)]
    return (approximated.double() - exact.double()).norm(dim=(-2, -1)) / (lengths[0] * lengths[1]).sqrt()


def relative_mean_absolute_error(approximated: Tensor, exact: Tensor) -> Tensor:
    """E |(w - w~) / w| over all pairs, as LLOPS defines it: a mean of ratios.

    Weights near zero decide it: where q . k has a density around zero its expectation is infinite from degree 1 on,
    and a sample's value grows with the sample. Beside it belongs `mean_absolute_error_ratio`, or the median.

    Args:
        approximated, exact: (..., queries, keys); no exact weight may be zero.

    Returns:
        (...,) float64; 1 for weights of zero.

    Raises:
        ValueError: the shapes differ, or an exact weight is zero.
    """
    return _ratios(approximated, exact).mean((-2, -1))


def median_relative_error(approximated: Tensor, exact: Tensor) -> Tensor:
    """The median over pairs of |(w - w~) / w|; arguments and errors as for `relative_mean_absolute_error`.

    Raises:
        ValueError: also where there is no pair.
    """
    if not exact.numel():
        raise ValueError(f"expected weights of at least one pair, found the shape {tuple(exact.shape)}")
    return _ratios(approximated, exact).flatten(-2).median(-1).values


def mean_absolute_error_ratio(approximated: Tensor, exact: Tensor) -> Tensor:
    """E |w - w~| / E |w| over all pairs: a ratio of means, which weights near zero leave alone.

    Args:
        approximated, exact: (..., queries, keys).

    Returns:
        (...,) float64; 1 for weights of zero.

    Raises:
        ValueError: the shapes differ.
    """
    _require_same_shape(approximated, exact)
    exact = exact.double()
    return (exact - approximated.double()).abs().mean((-2, -1)) / exact.abs().mean((-2, -1))


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
        ValueError: no column is left, or weights that are no matrix.
    """
    require_matrices(weights=weights)
    if not 0 <= skip_columns < weights.shape[-1]:
        raise ValueError(f"expected skip_columns from 0 to {weights.shape[-1] - 1}, found {skip_columns}")
    largest = weights[..., skip_columns:].double().square().sum(-2).amax(-1)
    return largest * weights.shape[-2] if times_length else largest


def _ratios(approximated: Tensor, exact: Tensor) -> Tensor:
    _require_same_shape(approximated, exact)
    exact = exact.double()
    if (exact == 0).any():
        raise ValueError(
            "expected exact weights other than zero, for the error of each pair is divided by its weight: "
            "causal weights are zero above the diagonal, leave those out"
        )
    return ((exact - approximated.double()) / exact).abs()


def _require_same_shape(approximated: Tensor, exact: Tensor) -> None:
    """Refuse weights that would be broadcast against each other.

    Raises:
        ValueError: naming both shapes.
    """
    if approximated.shape != exact.shape:
        raise ValueError(
            f"expected approximated and exact weights of one shape, found {tuple(approximated.shape)} and "
            f"{tuple(exact.shape)}"
        )
