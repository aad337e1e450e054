"""From a model and data to numbers. Nothing here reads or writes files, and nothing prints."""

from polysketch.evaluation.approximation import (
    AttentionInputs,
    attention_inputs,
    column_alpha,
    common_scale,
    factor_error,
    feature_weights,
    fit_feature_map,
    mass_beyond_window,
    mean_absolute_error_ratio,
    mechanism_weights,
    median_relative_error,
    operator_norm,
    operator_norm_error,
    optimal_features,
    optimal_frobenius_error,
    polynomial_weights,
    relative_frobenius_error,
    relative_mean_absolute_error,
    sketch_error,
)
from polysketch.evaluation.evaluate import Evaluation, evaluate
from polysketch.evaluation.position import ChunkStartLoss, loss_at_chunk_starts
from polysketch.evaluation.recall import recall_accuracy

__all__ = [
    "AttentionInputs",
    "ChunkStartLoss",
    "Evaluation",
    "attention_inputs",
    "column_alpha",
    "common_scale",
    "evaluate",
    "factor_error",
    "feature_weights",
    "fit_feature_map",
    "loss_at_chunk_starts",
    "mass_beyond_window",
    "mean_absolute_error_ratio",
    "mechanism_weights",
    "median_relative_error",
    "operator_norm",
    "operator_norm_error",
    "optimal_features",
    "optimal_frobenius_error",
    "polynomial_weights",
    "recall_accuracy",
    "relative_frobenius_error",
    "relative_mean_absolute_error",
    "sketch_error",
]
