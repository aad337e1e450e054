"""Errors of weights, pair by pair, relative to each pair's own weight (LLOPS, equation 21)."""

from torch import Tensor

from polysketch.evaluation.approximation.frobenius import require_same_shape

__all__ = ["mean_absolute_error_ratio", "median_relative_error", "relative_mean_absolute_error"]


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
    """The median over pairs of |(w - w~) / w|; arguments and errors as for `relative_mean_absolute_error`."""
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
    require_same_shape(approximated, exact)
    exact = exact.double()
    return (exact - approximated.double()).abs().mean((-2, -1)) / exact.abs().mean((-2, -1))


def _ratios(approximated: Tensor, exact: Tensor) -> Tensor:
    require_same_shape(approximated, exact)
    exact = exact.double()
    if (exact == 0).any():
        raise ValueError(
            "expected exact weights other than zero, for the error of each pair is divided by its weight: "
            "causal weights are zero above the diagonal, leave those out"
        )
    return ((exact - approximated.double()) / exact).abs()
