"""The language models that are compared, by name: to add one, add a line to `MODELS`."""

from collections.abc import Callable
from typing import Any

import torch

from polysketch.benchmarking.variants import Sizes
from polysketch.models import TransformerLM, preset

BASELINE = "softmax"
"""What every other model is compared with."""


def _polysketch(sizes: Sizes, *, learned: bool) -> tuple[str, dict[str, Any]]:
    options = {"sketch_size": sizes.sketch_size, "local_chunk": sizes.local, "learned": learned}
    return "polysketch", options


MODELS: dict[str, Callable[[Sizes], tuple[str, dict[str, Any]]]] = {
    "softmax": lambda sizes: ("softmax", {}),
    "learned": lambda sizes: _polysketch(sizes, learned=True),
    "random": lambda sizes: _polysketch(sizes, learned=False),
    "polynomial": lambda sizes: ("polynomial", {}),
}
"""Name -> (mechanism, its options) in every layer; "learned" and "random" are polysketch attention."""


def build_model(name: str, preset_name: str, sizes: Sizes) -> TransformerLM:
    """The preset with the mechanism `name`, the same random weights every time.

    Raises:
        ValueError: an unknown name or preset; the message lists those that exist.
    """
    check_models([name])
    mechanism, options = MODELS[name](sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TransformerLM(preset(preset_name, attention=mechanism, attention_options=options))


def check_models(names: list[str] | tuple[str, ...]) -> None:
    """Refuse unknown names.

    Raises:
        ValueError: listing those that exist.
    """
    for name in names:
        if name not in MODELS:
            raise ValueError(f"unknown model {name!r}; expected {', '.join(MODELS)}")


def with_baseline(names: tuple[str, ...]) -> list[str]:
    """The baseline first, each once."""
    return list(dict.fromkeys((BASELINE, *names)))
