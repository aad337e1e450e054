"""Loss, perplexity, bits per byte and loss by position of a language model on a run of tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polysketch.data.tokens import Tokens, stretch
from polysketch.evaluation.documents import sum_document_losses
from polysketch.evaluation.losses import PositionLosses, Sharing, sum_losses
from polysketch.models import TransformerLM

__all__ = ["FIRST_BUCKET", "Evaluation", "evaluate"]

FIRST_BUCKET = 64
"""Positions in the first bucket of `loss_by_position`; each later edge is twice the one before."""


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured. Losses are in nats per token, positions count from 0 at a window's first token.

    Attributes:
        loss: mean cross-entropy over all `num_tokens` predictions.
        perplexity: exp(loss), per token of the tokenizer; infinite where that overflows.
        bits_per_byte: summed loss in bits over `num_bytes`; None without `token_bytes` or without any byte.
            Comparable between tokenizers, which perplexity is not.
        num_tokens: predicted tokens: every token but the very first, each once.
        num_bytes: bytes of text those tokens stand for (end-of-text stands for 0; its loss is counted), or None.
        context_length: length of a window; a token sees only the tokens before it in its window.
        position_edges: int64, (buckets + 1,): 0, 64, 128, 256, ...; the last edge is the number of positions.
        loss_by_position: float64, (buckets,): mean loss of each bucket.
        loss_at_position: float64, (positions,): mean loss at every single position.
        count_at_position: int64, (positions,): how many predictions each of those is the mean of.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    num_tokens: int
    num_bytes: int | None
    context_length: int
    position_edges: np.ndarray
    loss_by_position: np.ndarray
    loss_at_position: np.ndarray
    count_at_position: np.ndarray


def evaluate(
    model: TransformerLM,
    tokens: Tokens,
    *,
    context_length: int,
    span: int = 2048,
    batch_size: int = 8,
    token_bytes: np.ndarray | None = None,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    sharing: Sharing | None = None,
    end_of_text: int | None = None,
    carry: bool = False,
) -> Evaluation:
    """Measure how well `model` predicts `tokens`, at any context length, in bounded memory.

    The tokens are cut into windows of `context_length` that do not overlap; every token but the first is predicted
    exactly once, from the tokens before it in its window (a shorter window takes what is left at the end). A window is
    read `span` tokens at a time, carrying the model's state, so the context may exceed the one used in training. With
    `hyper` a window is read at once, for its state would give exact softmax and not its estimate.

    Cost: linear in the number of tokens for mechanisms whose state does not grow; memory of batch_size * span tokens'
    activations plus the state; with `hyper` batch_size * context_length tokens' activations. Autocast regions of the
    caller apply. The model's training mode is restored.

    Args:
        model: a language model; its weights are not changed.
        tokens: flat token ids, (num_tokens,), any integer dtype, for instance those of a prepared split.
        context_length: tokens in a window.
        span: tokens read at a time; changes memory and speed, and the result only by rounding.
        batch_size: windows read at a time; likewise.
        token_bytes: (vocab_size,) bytes of text that each id stands for, needed for bits per byte.
        max_tokens: predict only this many tokens, from the beginning. Default: all.
        device: where to compute. Default: where the model is; the model itself is not moved.
        on_progress: called as (tokens done, tokens in all) after every batch.
        sharing: several processes with the same model, each of which calls this and computes some of the windows; all
            get the result of the whole.
        end_of_text: the id that ends a document: documents are then read apart, each from position 0, and longer ones
            than the context in pieces of so many tokens. The first token of a document is not predicted. Positions of
            the result are those in a piece.
        carry: read documents whole, however long, `context_length` tokens at a time with the state carried along; one
            at a time, by all processes. Positions are those in a document.

    Raises:
        ValueError: fewer tokens than the context needs, an id outside the vocabulary, a size that is not positive,
            or a `token_bytes` that does not cover the vocabulary.
    """
    _require_positive(context_length=context_length, span=span, batch_size=batch_size, max_tokens=max_tokens)
    if end_of_text is None:
        _require_enough(tokens, context_length)
    _require_covering(token_bytes, model.config.vocab_size)
    tokens = tokens if max_tokens is None else stretch(tokens, 0, max_tokens + 1)
    common: dict[str, Any] = {
        "context_length": context_length,
        "batch_size": batch_size,
        "token_bytes": token_bytes,
        "device": _device_of(model) if device is None else torch.device(device),
        "sharing": sharing,
    }
    if end_of_text is None:
        losses = sum_losses(model, tokens, span=span, on_progress=on_progress, **common)
    else:
        losses = sum_document_losses(model, tokens, end_of_text=end_of_text, carry=carry, **common)
    return _summarise(losses, context_length)


def _summarise(losses: PositionLosses, context_length: int) -> Evaluation:
    """Turn summed losses into means and their derived figures."""
    total, num_tokens = float(losses.sums.sum()), int(losses.counts.sum())
    edges = _bucket_edges(len(losses.sums))
    return Evaluation(
        loss=total / num_tokens,
        perplexity=_exp(total / num_tokens),
        bits_per_byte=total / math.log(2) / losses.num_bytes if losses.num_bytes else None,
        num_tokens=num_tokens,
        num_bytes=losses.num_bytes,
        context_length=context_length,
        position_edges=edges,
        loss_by_position=np.add.reduceat(losses.sums, edges[:-1]) / np.add.reduceat(losses.counts, edges[:-1]),
        loss_at_position=losses.sums / losses.counts,
        count_at_position=losses.counts,
    )


def _bucket_edges(num_positions: int) -> np.ndarray:
    """Return 0, FIRST_BUCKET, 2 FIRST_BUCKET, 4 FIRST_BUCKET, ... with `num_positions` as the last edge."""
    edges, edge = [0], FIRST_BUCKET
    while edge < num_positions:
        edges.append(edge)
        edge *= 2
    return np.array([*edges, num_positions], dtype=np.int64)


def _exp(loss: float) -> float:
    """Return exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if not loss > 700 else math.inf


def _device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def _require_positive(**sizes: int | None) -> None:
    """Refuse sizes below 1, by name; None stands for no limit."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"expected {name} of at least 1, found {size}")


def _require_enough(tokens: Tokens, context_length: int) -> None:
    """Refuse data that does not fill one window."""
    if len(tokens) < context_length + 1:
        raise ValueError(
            f"expected at least {context_length + 1} tokens for a context of {context_length}, found {len(tokens)}: "
            "choose a shorter context or prepare more text"
        )


def _require_covering(token_bytes: np.ndarray | None, vocab_size: int) -> None:
    """Refuse byte counts of a vocabulary that the model cannot hold; a model may be padded beyond its tokenizer."""
    if token_bytes is not None and (token_bytes.ndim != 1 or len(token_bytes) > vocab_size):
        raise ValueError(
            f"expected token_bytes of shape (at most {vocab_size},), found {token_bytes.shape}: "
            "the tokenizer's vocabulary is larger than the model's; it is probably another tokenizer"
        )
