"""How near maps come to (q . k)^p, and mechanisms to what they approximate, against size, degree and length."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.llops.contenders import APPROXIMATIONS, CONTENDERS, rank_of
from experiments.llops.vectors import Vectors
from polysketch import attention, evaluation
from polysketch.benchmarking.settings import check_positive
from polysketch.feature_maps import FeatureMap

__all__ = ["ApproximationSettings", "measure_maps", "measure_mechanisms"]

_SINKS = 32  # columns that HyperAttention, section 4.3, leaves out for language models
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ApproximationSettings:
    """What is compared, and how long maps are fitted."""

    maps: tuple[str, ...] = ("random", "network", "llops", "gaussian-squared", "srht-squared", "learned-squared")
    """random (products of Gaussian projections, data-independent), network (two-layer networks, fitted), llops
    (fitted), gaussian-squared, srht-squared, learned-squared (polysketch, the last fitted; degrees 4, 8, ... only);
    to see what limits llops: llops-rank-2, llops-rank-4 (sums of as many products), forms (any forms of the degree, by
    the SVD of the tokens maps are fitted to)"""
    mechanisms: tuple[str, ...] = tuple(APPROXIMATIONS)
    """mechanisms whose normalised weights are compared with those of the one they approximate"""
    degrees: tuple[int, ...] = (2, 3, 4)
    """p, of the kernel (q . k)^p that maps approximate"""
    features: tuple[int, ...] = (32, 64, 128, 256)
    """numbers of features; maps whose products are squared have the r whose r (r + 1) / 2 sums are as many"""
    lengths: tuple[int, ...] = (512, 1_024)
    """tokens: errors are over all pairs of so many queries and keys, and so is the truncated SVD"""
    windows: tuple[int, ...] = (64, 256)
    """tokens of the windows beyond which the attention mass is given"""
    draws: int = 3
    """random maps to average over"""
    fit_tokens: int = 8_192
    """queries, and as many keys, that maps are fitted to"""
    steps: int = 300
    """of a fit"""
    batch_size: int = 1_024
    """queries, and as many keys, of a step"""
    seed: int = 0
    """of random and of fitted maps"""

    def __post_init__(self) -> None:
        check_positive(degrees=self.degrees, features=self.features, lengths=self.lengths, windows=self.windows)
        check_positive(draws=self.draws, fit_tokens=self.fit_tokens, steps=self.steps, batch_size=self.batch_size)
        for what, names, table in (("map", self.maps, CONTENDERS), ("mechanism", self.mechanisms, APPROXIMATIONS)):
            for name in names:
                if name not in table:
                    raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")


def measure_maps(
    vectors: Sequence[Vectors], settings: ApproximationSettings, progress: Progress
) -> list[dict[str, Any]]:
    """Fit what is to be fitted, then measure every map on queries and keys it was fitted to and on held-out ones.

    Returns:
        One for each inputs, degree, number of features, map and length: `fitted` and `held_out` hold the errors
        (`frobenius`, `sketch_error`, `relative_mean_absolute`, `median_relative`, `mean_absolute_ratio`), and beside
        them the `optimum` of the truncated SVD of the same rank, and `ratio`, frobenius over optimum.
    """
    found = []
    for inputs in vectors:
        scale = evaluation.common_scale(*inputs.fitted)
        inputs = inputs._replace(
            fitted=_scaled(inputs.fitted, scale), held_out=_scaled(inputs.held_out, scale)
        )  # no relative error changes
        for degree in settings.degrees:
            found += _measure_degree(inputs, degree, settings, progress)
    return found


def _scaled(pair: tuple[Tensor, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0] / scale.to(pair[0].dtype), pair[1] / scale.to(pair[1].dtype)


def _measure_degree(
    inputs: Vectors, degree: int, settings: ApproximationSettings, progress: Progress
) -> list[dict[str, Any]]:
    built = _build(inputs, degree, settings, progress)
    found = []
    for length in settings.lengths:
        parts = {"fitted": _take(inputs.fitted, length), "held_out": _take(inputs.held_out, length)}
        exact = {
            part: evaluation.polynomial_weights(pair[0].double(), pair[1].double(), degree)
            for part, pair in parts.items()
        }
        ranks = sorted({rank_of(maps[0]) for _, _, maps, _ in built})
        optima = {
            part: dict(zip(ranks, evaluation.optimal_frobenius_error(weights, ranks).tolist(), strict=True))
            for part, weights in exact.items()
        }
        progress(f"{inputs.name}, degree {degree}: truncated SVD at {length:,} tokens")
        for name, features, maps, seconds in built:
            one = {
                "kind": "map",
                "inputs": inputs.name,
                "degree": degree,
                "features": features,
                "length": length,
                "map": name,
                "series": CONTENDERS[name].title,
                "rank": rank_of(maps[0]),
                "draws": len(maps),
                "fit_seconds": seconds,
            }
            for part, pair in parts.items():
                one[part] = _errors(maps, pair, exact[part], degree, optima[part][rank_of(maps[0])])
            found.append(one)
    return found


def _build(
    inputs: Vectors, degree: int, settings: ApproximationSettings, progress: Progress
) -> list[tuple[str, int, list[FeatureMap], float]]:
    """Name, number of features, maps (several draws of random ones), seconds of the fit."""
    built = []
    for features in settings.features:
        for name in settings.maps:
            if CONTENDERS[name].takes(degree):
                maps, seconds = _contender(name, inputs, degree, features, settings)
                built.append((name, features, maps, seconds))
                progress(f"{inputs.name}, degree {degree}, {features} features: {CONTENDERS[name].title}")
    return built


def _contender(
    name: str, inputs: Vectors, degree: int, features: int, settings: ApproximationSettings
) -> tuple[list[FeatureMap], float]:
    contender, head_dim, started = CONTENDERS[name], inputs.fitted[0].shape[-1], time.monotonic()
    torch.manual_seed(settings.seed)
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
            seed=settings.seed,
        )
    return maps, time.monotonic() - started


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


def measure_mechanisms(
    vectors: Sequence[Vectors], settings: ApproximationSettings, progress: Progress
) -> list[dict[str, Any]]:
    """Compare the normalised weights and the output of mechanisms with those of what they approximate, in float64.

    Returns:
        One for each inputs, length, mechanism and size: `frobenius`, `operator_norm_error` of the output
        (HyperAttention, Theorem 1), `alpha`, `alpha_over_length` and `alpha_without_sinks` of the exact weights (the
        last two without the factor n, and the last without the first 32 columns), and `beyond`, the mass beyond each
        window, with `exact_beyond`.
    """
    found = []
    for inputs in vectors:
        for length in settings.lengths:
            tensors = tuple(x[:, :, :length].double() for x in inputs.sequence)
            if tensors[0].shape[2] < length:
                continue  # a context of the model is shorter
            for name in settings.mechanisms:
                found += _measure_mechanism(name, inputs.name, tensors, settings)
                progress(f"{inputs.name}, {length:,} tokens: {name}")
    return found


def _measure_mechanism(
    name: str, inputs: str, tensors: tuple[Tensor, ...], settings: ApproximationSettings
) -> list[dict[str, Any]]:
    query, key, value = tensors
    length, one = query.shape[2], APPROXIMATIONS[name]
    exact = _build_mechanism(*one.exact, query)
    exact_weights = evaluation.mechanism_weights(exact, query, key, causal=one.causal)[0, 0]
    exact_output = exact_weights @ value[0, 0]
    windows = [window for window in settings.windows if window < length]
    known = {
        "kind": "mechanism",
        "inputs": inputs,
        "length": length,
        "mechanism": name,
        "series": f"{name} for {one.exact[0]}",
        **_alphas(exact_weights),
        "exact_beyond": _beyond(exact_weights, windows, one.causal),
    }
    found = []
    for size in settings.features:
        torch.manual_seed(settings.seed)
        weights = evaluation.mechanism_weights(
            _build_mechanism(name, one.options(size), query), query, key, causal=one.causal
        )[0, 0]
        operator_error = evaluation.operator_norm_error(weights @ value[0, 0], exact_output, exact_weights, value[0, 0])
        errors = {
            "features": size,
            "frobenius": float(evaluation.relative_frobenius_error(weights, exact_weights)),
            "operator_norm_error": float(operator_error),
            "beyond": _beyond(weights, windows, one.causal),
        }
        found.append({**known, **errors})
    return found


def _build_mechanism(name: str, options: dict[str, Any], query: Tensor) -> attention.Mechanism:
    return attention.build(name, num_heads=1, head_dim=query.shape[-1], **options).to(query).eval()


def _alphas(weights: Tensor) -> dict[str, float | None]:
    sinks = weights.shape[-1] > _SINKS
    return {
        "alpha": float(evaluation.column_alpha(weights)),
        "alpha_over_length": float(evaluation.column_alpha(weights, times_length=False)),
        "alpha_without_sinks": float(evaluation.column_alpha(weights, skip_columns=_SINKS, times_length=False))
        if sinks
        else None,
    }


def _beyond(weights: Tensor, windows: list[int], causal: bool) -> dict[str, float]:
    return {str(window): float(evaluation.mass_beyond_window(weights, window, causal=causal)) for window in windows}
