"""Errors of weights in the Frobenius norm: relative to the weights, and as PolySketchFormer's Theorem 1.1 bounds it."""

from torch import Tensor

__all__ = ["relative_frobenius_error", "sketch_error"]


def relative_frobenius_error(approximated: Tensor, exact: Tensor) -> Tensor:
    """|w~ - w|_F / |w|_F.

    Args:
        approximated, exact: (..., queries, keys).

    Returns:
        (...,) float64; 0 for equal weights, 1 for weights of zero.

    Raises:
        ValueError: the shapes differ.
    """
    require_same_shape(approximated, exact)
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
        ValueError: the shapes of the weights differ.
    """
    require_same_shape(approximated, exact)
    lengths = [x.double().norm(dim=-1).pow(2 * degree).sum(-1) for x in (query, key)]
    return (approximated.double() - exact.double()).norm(dim=(-2, -1)) / (lengths[0] * lengths[1]).sqrt()


def require_same_shape(approximated: Tensor, exact: Tensor) -> None:
    """Refuse weights that would be broadcast against each other.

    Raises:
        ValueError: naming both shapes.
    """
    if approximated.shape != exact.shape:
        raise ValueError(
            f"expected approximated and exact weights of one shape, found {tuple(approximated.shape)} and "
            f"{tuple(exact.shape)}"
        )
