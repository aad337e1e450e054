"""The matrix of weights of any mechanism or feature map, for looking at, and its share beyond a window."""

from typing import Any

import torch
from torch import Tensor

from polysketch.attention import Mechanism
from polysketch.feature_maps import FeatureMap

__all__ = ["feature_weights", "mass_beyond_window", "mechanism_weights", "polynomial_weights"]


@torch.no_grad()
def mechanism_weights(
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    hidden: Tensor | None = None,
    unrotated: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What the mechanism's output multiplies the values with: normalised weights, where it normalises.

    The identity goes in as value, `head_dim` columns at a time, so that mechanisms that know values only of that width
    are served too. Rows sum to one where there is no offset, to less with one, to anything without a denominator.
    A mechanism whose weights depend on the values (rows sampled by their norms) shows those of the identity.

    Args:
        mechanism: any.
        query, key, causal, key_mask, hidden: as for `Mechanism.forward`.
        unrotated: query and key before rotary positions, for a mechanism that `reads_unrotated`; else ignored.

    Returns:
        (batch, num_heads, queries, keys), in the dtype of query; no gradient.

    Raises:
        ValueError: as the mechanism; a key of other than four dimensions.

    Cost: as many forward passes as the keys hold widths of a head.
    """
    if key.ndim != 4:
        raise ValueError(f"expected a key (batch, key heads, length, head_dim), found {tuple(key.shape)}")
    length, width = key.shape[2], mechanism.head_dim
    given: dict[str, Any] = {"hidden": hidden, **({"unrotated": unrotated} if mechanism.reads_unrotated else {})}
    identity = torch.eye(length, dtype=query.dtype, device=query.device)
    parts = []
    for start in range(0, length, width):
        value = query.new_zeros(length, width)
        columns = identity[:, start : start + width]
        value[:, : columns.shape[1]] = columns
        value = value.expand(key.shape[0], key.shape[1], length, width)
        output = mechanism(query, key, value, causal=causal, key_mask=key_mask, **given)
        parts.append(output[..., : columns.shape[1]])
    return torch.cat(parts, -1)


def feature_weights(feature_map: FeatureMap, query: Tensor, key: Tensor) -> Tensor:
    """(phi_q(q_i) . phi_k(k_j))^power for all pairs, or the product of two factors, not normalised.

    Args:
        feature_map: any.
        query: (batch, heads, queries, head_dim).
        key: (batch, key heads, keys, head_dim), key heads a divisor of heads.

    Returns:
        (batch, heads, queries, keys).
    """
    query_features, key_features = feature_map.map_queries(query), feature_map.map_keys(key)
    key_features = key_features.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return feature_map.weights(query_features, key_features)


def polynomial_weights(query: Tensor, key: Tensor, degree: int) -> Tensor:
    """(q_i . k_j)^degree for all pairs: (..., queries, head_dim) and (..., keys, head_dim) -> (..., queries, keys).

    Raises:
        ValueError: a degree below 0, or one that no number of 64 bits holds.
    """
    if not 0 <= degree < 2**31:
        raise ValueError(f"expected a degree of at least 0, found {degree}")
    return (query @ key.mT) ** degree


def mass_beyond_window(weights: Tensor, window: int, *, causal: bool = True) -> Tensor:
    """The mean share of a query's attention that falls on keys `window` or more tokens away.

    A sliding window of that many tokens gives exactly this share up. The mean is over queries that have such keys:
    with `causal`, those from position `window` on. Weights of either sign count by their absolute value, and a query
    without any weight has a share of zero.

    Args:
        weights: (..., length, length), normalised or not, of `mechanism_weights` for instance; with `causal` what is
            above the diagonal is not looked at.
        window: tokens, itself included: at 1, all but the own token is beyond.
        causal: only earlier keys are beyond, else later ones too.

    Returns:
        (...,) float64 in [0, 1].

    Raises:
        ValueError: a window below 1, or so long that no query has a key beyond it; weights that are no matrix.
    """
    require_matrices(weights=weights)
    length = weights.shape[-1]
    if not 1 <= window < length:
        raise ValueError(f"expected a window from 1 to {length - 1} for {length} tokens, found {window}")
    positions = torch.arange(length, device=weights.device)
    distance = positions[:, None] - positions
    beyond = distance >= window if causal else distance.abs() >= window
    masses = weights.double().abs()
    masses = masses.tril() if causal else masses
    shares = (masses * beyond).sum(-1) / masses.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return shares[..., beyond.any(-1)].mean(-1)


def require_matrices(**tensors: Tensor) -> None:
    """Refuse tensors of fewer than two dimensions.

    Raises:
        ValueError: with the name of the first such.
    """
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            raise ValueError(f"expected {name} of two dimensions or more, found {tuple(tensor.shape)}")
