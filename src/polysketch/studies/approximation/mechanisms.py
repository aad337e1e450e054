"""How near mechanisms come to what they approximate, against their size and the length."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polysketch import attention, evaluation
from polysketch.benchmarking.settings import check_positive
from polysketch.studies.approximation.contenders import APPROXIMATIONS
from polysketch.studies.approximation.vectors import InputSettings, Vectors

__all__ = ["MechanismSettings", "measure_mechanism"]

_SINKS = 32  # columns that HyperAttention, section 4.3, leaves out for language models


@dataclass(frozen=True, kw_only=True)
class MechanismSettings(InputSettings):
    """One size of a study of mechanisms.

    Attributes:
        features: sizes: features, samples, landmarks or tokens of a window, whatever a mechanism has.
        lengths: tokens.
        windows: tokens of the windows beyond which the attention mass is given.
    """

    features: tuple[int, ...] = (32, 64, 128, 256)
    lengths: tuple[int, ...] = (512, 1_024)
    windows: tuple[int, ...] = (64, 256)

    def __post_init__(self) -> None:
        check_positive(features=self.features, lengths=self.lengths, windows=self.windows)
        super().__post_init__()


def measure_mechanism(name: str, inputs: Vectors, settings: MechanismSettings, seed: int) -> list[dict[str, Any]]:
    """Compare the normalised weights and the output of a mechanism with those of what it approximates, in float64.

    Args:
        name: of `APPROXIMATIONS`.
        inputs: whose `sequence` is attended over.
        settings: of the study.
        seed: of random mechanisms.

    Returns:
        One for each length that the inputs have and each size: `frobenius`, `operator_norm_error` of the output
        (HyperAttention, Theorem 1), `alpha`, `alpha_over_length` and `alpha_without_sinks` of the exact weights (the
        last two without the factor n, and the last without the first 32 columns), and `beyond`, the mass beyond each
        window, with `exact_beyond`.
    """
    found = []
    for length in settings.lengths:
        tensors = tuple(x[:, :, :length].double() for x in inputs.sequence)
        if tensors[0].shape[2] == length:  # a context of the model may be shorter
            found += _at_length(name, inputs.name, tensors, settings, seed)
    return found


def _at_length(
    name: str, inputs: str, tensors: tuple[Tensor, ...], settings: MechanismSettings, seed: int
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
        torch.manual_seed(seed)
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
