"""Positive random features (FAVOR+): exponentials or ReLUs of random projections."""

from polysketch.ops.random_features.api import random_features, random_features_backend

__all__ = ["random_features", "random_features_backend"]
