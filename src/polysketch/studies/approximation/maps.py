"""How near maps come to (q . k)^p, against the number of features, the degree and the length."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polysketch import evaluation
from polysketch.benchmarking.settings import check_positive
from polysketch.feature_maps import FeatureMap
from polysketch.studies.approximation.contenders import CONTENDERS, rank_of
from polysketch.studies.approximation.factors import factor_error
from polysketch.studies.approximation.vectors import InputSettings, Vectors

__all__ = ["MapSettings", "measure_map"]


@dataclass(frozen=True, kw_only=True)
class MapSettings(InputSettings):
    """One size of a study of maps.

    Attributes:
        degrees: p, of the kernel (q . k)^p.
        features: numbers of features; maps whose products are squared have the r whose r (r + 1) / 2 sums are as many.
        lengths: tokens: errors are over all pairs of so many queries and keys, and so is the truncated SVD.
        draws: random maps to average over.
        steps, batch_size: of a fit; queries, and as many keys, of a step.
    """

    degrees: tuple[int, ...] = (2, 3, 4)
    features: tuple[int, ...] = (32, 64, 128, 256)
    lengths: tuple[int, ...] = (512, 1_024)
    draws: int = 3
    steps: int = 300
    batch_size: int = 1_024

    def __post_init__(self) -> None:
        check_positive(degrees=self.degrees, features=self.features, lengths=self.lengths)
        check_positive(draws=self.draws, steps=self.steps, batch_size=self.batch_size)
        super().__post_init__()


def measure_map(name: str, inputs: Vectors, degree: int, settings: MapSettings, seed: int) -> list[dict[str, Any]]:
    """Fit what is to be fitted, then measure a map on queries and keys it was fitted to and on held-out ones.

    Args:
        name: of `CONTENDERS`.
        inputs: both parts.
        degree: p; a map that has no such degree has no measurements.
        settings: of the study.
        seed: of random and of fitted maps.

    Returns:
        One for each number of features and length: `fitted` and `held_out` hold the errors (`frobenius`,
        `sketch_error`, `relative_mean_absolute`, `median_relative`, `mean_absolute_ratio`), and beside them the
        `optimum` of the truncated SVD of the same rank, and `ratio`, frobenius over optimum.

    Raises:
        ValueError: a length of more tokens than there are.
    """
    if not CONTENDERS[name].takes(degree):
        return []
    scale = evaluation.common_scale(*inputs.fitted)  # no relative error changes
    inputs = inputs._replace(fitted=_scaled(inputs.fitted, scale), held_out=_scaled(inputs.held_out, scale))
    built = [(features, *_built(name, inputs, degree, features, settings, seed)) for features in settings.features]
    return [one for length in settings.lengths for one in _at_length(name, inputs, degree, length, built)]


def _scaled(pair: tuple[Tensor, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0] / scale.to(pair[0].dtype), pair[1] / scale.to(pair[1].dtype)


def _built(
    name: str, inputs: Vectors, degree: int, features: int, settings: MapSettings, seed: int
) -> tuple[list[FeatureMap], float]:
    """The map, or several draws of a random one, and the seconds of the fit."""
    contender, head_dim, started = CONTENDERS[name], inputs.fitted[0].shape[-1], time.monotonic()
    torch.manual_seed(seed)
    random = contender.learning_rate is None and contender.start is None
    draws = settings.draws if random else 1
    maps = [contender.build(head_dim, degree, features).to(inputs.fitted[0]) for _ in range(draws)]
    if contender.start is not None:
        contender.start(maps[0], *inputs.fitted, degree)
    if contender.learning_rate is not None:
        evaluation.fit_feature_map(
            maps[0],
            *inputs.fitted,
            degree=degree,
            steps=settings.steps,
            batch_size=settings.batch_size,
            learning_rate=contender.learning_rate(degree),
            seed=seed,
        )
    return maps, time.monotonic() - started


def _at_length(
    name: str, inputs: Vectors, degree: int, length: int, built: list[tuple[int, list[FeatureMap], float]]
) -> list[dict[str, Any]]:
    parts = {"fitted": _take(inputs.fitted, length), "held_out": _take(inputs.held_out, length)}
    exact = {
        part: evaluation.polynomial_weights(pair[0].double(), pair[1].double(), degree) for part, pair in parts.items()
    }
    ranks = [rank_of(maps[0]) for _, maps, _ in built]
    optima = {part: evaluation.optimal_frobenius_error(weights, ranks).tolist() for part, weights in exact.items()}
    return [
        {
            "kind": "map",
            "inputs": inputs.name,
            "degree": degree,
            "features": features,
            "width": maps[0].feature_dim,
            "length": length,
            "map": name,
            "series": CONTENDERS[name].title,
            "rank": rank,
            "draws": len(maps),
            "fit_seconds": seconds,
            **{part: _errors(maps, pair, exact[part], degree, optima[part][place]) for part, pair in parts.items()},
            "factor_error": _lost_by_products(name, parts["held_out"], degree, rank),
        }
        for place, ((features, maps, seconds), rank) in enumerate(zip(built, ranks, strict=True))
    ]


def _lost_by_products(name: str, pair: tuple[Tensor, Tensor], degree: int, rank: int) -> tuple[float, float] | None:
    """Theorem 3.4, beside the optimal sketch, of fewer features than tokens."""
    return factor_error(*pair, degree, rank) if name == "forms" and rank <= pair[0].shape[0] else None


def _take(pair: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """As many queries and keys, spread over all there are.

    Raises:
        ValueError: there are fewer.
    """
    if pair[0].shape[0] < length:
        raise ValueError(f"expected at least {length} tokens, found {pair[0].shape[0]}: give more, or a shorter length")
    places = torch.arange(length, device=pair[0].device) * pair[0].shape[0] // length
    return pair[0][places], pair[1][places]


@torch.no_grad()
def _errors(
    maps: list[FeatureMap], pair: tuple[Tensor, Tensor], exact: Tensor, degree: int, optimum: float
) -> dict[str, float]:
    """Means over the maps."""
    total: dict[str, float] = {}
    for feature_map in maps:
        weights = evaluation.feature_weights(feature_map, pair[0][None, None], pair[1][None, None])[0, 0].double()
        errors = {
            "frobenius": evaluation.relative_frobenius_error(weights, exact),
            "sketch_error": evaluation.sketch_error(weights, exact, *pair, degree),
            "relative_mean_absolute": evaluation.relative_mean_absolute_error(weights, exact),
            "median_relative": evaluation.median_relative_error(weights, exact),
            "mean_absolute_ratio": evaluation.mean_absolute_error_ratio(weights, exact),
        }
        for name, error in errors.items():
            total[name] = total.get(name, 0.0) + float(error) / len(maps)
    return {**total, "optimum": optimum, "ratio": total["frobenius"] / optimum if optimum else float("inf")}
