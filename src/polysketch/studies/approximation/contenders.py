"""What is compared in approximating: maps of (q . k)^p, and mechanisms of others."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.evaluation import feature_weights, polynomial_weights
from polysketch.feature_maps import (
    FeatureMap,
    GaussianSketch,
    LearnedSketch,
    LowRankSketch,
    SRHTSketch,
    TwoLayerNetwork,
)
from polysketch.studies.approximation.forms import OptimalForms

__all__ = ["APPROXIMATIONS", "CONTENDERS", "Approximation", "Contender", "rank_of"]

_SCALED_ON = 512  # tokens
_DEGREE = 3  # of the polynomial that is squared


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A feature map that approximates (q . k)^p.

    Attributes:
        title: in tables and plots.
        build: (head_dim, degree, features) -> the map, from PyTorch's default generator.
        learning_rate: degree -> of its fit, relative to the size of its parameters; None for maps that are not fitted.
            Products of more factors move faster, and bear less.
        start: (map, query, key, degree) -> None, what a fit begins with, or all of it without a `learning_rate`; None
            for nothing.
        squares: its products are squared, so that the degree must be a power of two, 4 or more.
    """

    title: str
    build: Callable[[int, int, int], FeatureMap]
    learning_rate: Callable[[int], float] | None = None
    start: Callable[[FeatureMap, Tensor, Tensor, int], None] | None = None
    squares: bool = False

    def takes(self, degree: int) -> bool:
        """Whether there is such a map of this degree."""
        return not self.squares or (degree >= 4 and degree & (degree - 1) == 0)


def rank_of(feature_map: FeatureMap) -> int:
    """The rank that its weights have at most; squared products of r features have r (r + 1) / 2."""
    features = feature_map.feature_dim
    return features if feature_map.power == 1 else features * (features + 1) // 2


def _low_rank(head_dim: int, degree: int, features: int, rank: int = 1) -> LowRankSketch:
    """At its start unbiased for (q . k)^degree: a random sketch by products of Gaussian projections."""
    made = LowRankSketch(head_dim, degree=degree, num_features=features, rank=rank)
    with torch.no_grad():
        for factors in made.parameters():
            factors.mul_(head_dim**0.5)
    return made


@torch.no_grad()
def _scale_factors(feature_map: FeatureMap, query: Tensor, key: Tensor, degree: int) -> None:
    """Give all weights the common factor that suits them best: smaller than the kernel's, as they are noisy."""
    query, key = (x[:_SCALED_ON][None, None] for x in (query, key))
    weights, exact = feature_weights(feature_map, query, key), polynomial_weights(query, key, degree)
    factor = (weights * exact).sum().abs() / weights.square().sum()
    for factors in feature_map.parameters():
        factors.mul_(factor ** (0.5 / degree))


def _rate_of_products(degree: int) -> float:
    """By trial: 0.25 and 0.055 did best at degrees 2 and 3."""
    return 1.6 / degree**3


def _forms(head_dim: int, degree: int, features: int) -> OptimalForms:
    return OptimalForms(head_dim, degree=degree, num_features=features)


def _fit_forms(feature_map: FeatureMap, query: Tensor, key: Tensor, degree: int) -> None:
    feature_map.fit(query, key)  # type: ignore[operator]  # it is what _forms has built


def _network(head_dim: int, degree: int, features: int) -> TwoLayerNetwork:
    return TwoLayerNetwork(head_dim, num_features=features)


def _squared(kind: type[FeatureMap]) -> Callable[[int, int, int], FeatureMap]:
    """Of as many features as keep r (r + 1) / 2 sums within `features`."""

    def build(head_dim: int, degree: int, features: int) -> FeatureMap:
        size = max(1, (math.isqrt(8 * features + 1) - 1) // 2)
        return kind(head_dim, degree=degree, sketch_size=size)  # type: ignore[call-arg]

    return build


CONTENDERS: dict[str, Contender] = {
    "random": Contender(title="random sketch", build=_low_rank),
    "network": Contender(title="two-layer networks", build=_network, learning_rate=lambda _: 0.2),
    "llops": Contender(title="LLOPS", build=_low_rank, learning_rate=_rate_of_products, start=_scale_factors),
    "llops-rank-2": Contender(
        title="LLOPS, rank 2", build=partial(_low_rank, rank=2), learning_rate=_rate_of_products, start=_scale_factors
    ),
    "llops-rank-4": Contender(
        title="LLOPS, rank 4", build=partial(_low_rank, rank=4), learning_rate=_rate_of_products, start=_scale_factors
    ),
    "forms": Contender(title="any forms", build=_forms, start=_fit_forms),
    "gaussian-squared": Contender(title="squared Gaussian sketch", build=_squared(GaussianSketch), squares=True),
    "srht-squared": Contender(title="squared SRHT sketch", build=_squared(SRHTSketch), squares=True),
    "learned-squared": Contender(
        title="squared learned sketch",
        build=_squared(LearnedSketch),
        learning_rate=lambda degree: 0.8 / degree**2,
        squares=True,
    ),
}
"""Every map, by the name it is asked for; those that are not fitted are data-independent."""


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """A mechanism, and the one whose normalised weights it approximates.

    Attributes:
        exact: the other's name in `attention.MECHANISMS`, and options.
        options: size -> the mechanism's options: so many features, landmarks or tokens of a window.
        causal: whether both are compared causally.
    """

    exact: tuple[str, dict[str, Any]]
    options: Callable[[int], dict[str, Any]]
    causal: bool = True


def _sketched(size: int) -> dict[str, Any]:
    return {"degree": 4, "learned": False, "local_chunk": None, "sketch_size": size}


def _powers(size: int) -> dict[str, Any]:
    return {"coefficients": _DEGREE, "linear": True, "sketch_size": size}


def _hashed(size: int) -> dict[str, Any]:
    """Half of the keys near by, half sampled; nothing attended exactly for being short."""
    half = max(1, size // 2)
    return {"chunk_size": half, "sample_size": half, "min_length": half}


APPROXIMATIONS: dict[str, Approximation] = {
    "polysketch-paper": Approximation(exact=("polynomial", {"degree": 4}), options=_sketched),
    "squared-polynomial": Approximation(exact=("squared-polynomial", {"coefficients": _DEGREE}), options=_powers),
    "local": Approximation(
        exact=("polynomial", {"degree": 4}), options=lambda size: {"degree": 4, "local_chunk": size}
    ),
    "performer": Approximation(exact=("softmax", {}), options=lambda size: {"num_features": size}),
    "sliding-window": Approximation(exact=("softmax", {}), options=lambda size: {"window": size}),
    "hyper": Approximation(exact=("softmax", {}), options=_hashed, causal=False),
    "nystrom": Approximation(exact=("softmax", {}), options=lambda size: {"num_landmarks": size}, causal=False),
}
"""Mechanisms by name, with what they approximate."""
