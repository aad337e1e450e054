"""How far a feature map or a mechanism is from what it approximates, and how near it could come."""

from polysketch.evaluation.approximation.capture import AttentionInputs, attention_inputs
from polysketch.evaluation.approximation.errors import (
    column_alpha,
    mean_absolute_error_ratio,
    median_relative_error,
    operator_norm,
    operator_norm_error,
    relative_frobenius_error,
    relative_mean_absolute_error,
    sketch_error,
)
from polysketch.evaluation.approximation.fitting import common_scale, fit_feature_map
from polysketch.evaluation.approximation.optimum import optimal_features, optimal_frobenius_error
from polysketch.evaluation.approximation.weights import (
    feature_weights,
    mass_beyond_window,
    mechanism_weights,
    polynomial_weights,
)

__all__ = [
    "AttentionInputs",
    "attention_inputs",
    "column_alpha",
    "common_scale",
    "feature_weights",
    "fit_feature_map",
    "mass_beyond_window",
    "mean_absolute_error_ratio",
    "mechanism_weights",
    "median_relative_error",
    "operator_norm",
    "operator_norm_error",
    "optimal_features",
    "optimal_frobenius_error",
    "polynomial_weights",
    "relative_frobenius_error",
    "relative_mean_absolute_error",
    "sketch_error",
]
