"""Attention in less than quadratic time: sketched polynomials, exact near the diagonal, a state of constant size."""

import importlib
from typing import TYPE_CHECKING, Any

from polysketch.extras import how_to_install

if TYPE_CHECKING:
    from polysketch import attention as attention
    from polysketch import benchmarking as benchmarking
    from polysketch import conversion as conversion
    from polysketch import data as data
    from polysketch import evaluation as evaluation
    from polysketch import feature_maps as feature_maps
    from polysketch import generation as generation
    from polysketch import integrations as integrations
    from polysketch import models as models
    from polysketch import nn as nn
    from polysketch import ops as ops
    from polysketch import training as training
    from polysketch.integrations.replacement import load_replaced as load_replaced
    from polysketch.integrations.replacement import replace_attention as replace_attention
    from polysketch.integrations.replacement import replacement_cache as replacement_cache
    from polysketch.integrations.replacement import restore_attention as restore_attention
    from polysketch.integrations.replacement import save_replaced as save_replaced

__version__ = "0.1.0"

_PACKAGES = (
    *("attention", "benchmarking", "conversion", "data", "evaluation", "feature_maps", "generation"),
    *("integrations", "models", "nn", "ops", "training"),
)
_OF_REPLACEMENT = ("load_replaced", "replace_attention", "replacement_cache", "restore_attention", "save_replaced")


def _load(name: str) -> Any:
    """A package, or a function for models of transformers, loaded when it is first asked for."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _OF_REPLACEMENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from polysketch.integrations import replacement
    except ModuleNotFoundError as error:
        raise ImportError(f"polysketch.{name}: {how_to_install(error.name or 'transformers')}") from error
    return getattr(replacement, name)


if not TYPE_CHECKING:  # type checkers would take any name from it

    def __getattr__(name: str) -> Any:
        return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_OF_REPLACEMENT})
