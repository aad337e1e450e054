"""The loss of the same tokens as the context before them grows, far beyond that of training."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polysketch.data import PreparedData
from polysketch.data.tokens import Tokens
from polysketch.evaluation import evaluate
from polysketch.models import TransformerLM
from polysketch.studies import kept

_SPAN = 1024


def at_lengths(
    model: TransformerLM, data: PreparedData, lengths: Sequence[int], predicted: int, stretches: int, folder: Path
) -> dict[str, Any]:
    """Losses of the last tokens of stretches of the test split, predicted from contexts of several lengths.

    The predicted tokens are the same at every length and for every model, so that only what stands before them differs.
    A context is read in spans with the model's state carried along: memory is constant where the state is.

    Args:
        model: a language model.
        data: whose test split is read.
        lengths: tokens of context before the last predicted token.
        predicted: tokens at the end of each stretch.
        stretches: how many, fewer where predicted tokens would overlap.
        folder: where each length is kept once it is measured.

    Returns:
        By length, `loss`, `by_stretch` and `seconds`; empty without lengths.

    Raises:
        ValueError: see `stretch_ends`.
    """
    if not lengths:
        return {}
    tokens, lengths = data.split("test").tokens, sorted(set(lengths))
    ends = stretch_ends(len(tokens), lengths, predicted, stretches)
    settings = {"predicted": predicted, "ends": ends, "test": data.description.splits["test"].sha256}

    def measured(length: int) -> dict[str, Any]:
        started = time.perf_counter()
        losses = losses_at(model, tokens, ends, length, predicted)
        seconds = round(time.perf_counter() - started, 1)
        by_stretch = losses.mean(axis=1).tolist()
        found = {"loss": float(losses.mean()), "by_stretch": by_stretch, "seconds": seconds}
        return {**found, "provenance": kept.provenance()}

    return {
        str(length): kept.kept_or_made(folder / f"{length}.json", settings, functools.partial(measured, length))
        for length in lengths
    }


def stretch_ends(num_tokens: int, lengths: Sequence[int], predicted: int, stretches: int) -> list[int]:
    """Where stretches end: the index of their last predicted token.

    Args:
        num_tokens: of the text.
        lengths: tokens of context, ascending.
        predicted: tokens predicted in each stretch.
        stretches: at most so many.

    Raises:
        ValueError: a length below the number of predicted tokens, or a text shorter than the longest.
    """
    if predicted < 1 or lengths[0] < predicted:
        raise ValueError(f"expected lengths of at least the {predicted} predicted tokens, found {lengths[0]}")
    free = num_tokens - 1 - lengths[-1]
    if free < 0:
        raise ValueError(f"expected more than {lengths[-1]} tokens of test text, found {num_tokens}")
    fitting = min(stretches, 1 + free // predicted)
    return np.linspace(lengths[-1], num_tokens - 1, fitting).astype(np.int64).tolist()


def losses_at(model: TransformerLM, tokens: Tokens, ends: Sequence[int], length: int, predicted: int) -> np.ndarray:
    """Losses in nats (stretches, predicted) of the last tokens of stretches, from `length` tokens before the last."""
    found = [
        evaluate(model, tokens[end - length : end + 1], context_length=length, span=_SPAN, batch_size=1) for end in ends
    ]
    return np.stack([one.loss_at_position[-predicted:] for one in found])
