"""Loss and perplexity against the length of the context, on the same tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polysketch.data.tokens import Tokens, stretch
from polysketch.evaluation.evaluate import Evaluation, evaluate
from polysketch.models import TransformerLM

__all__ = ["ContextLosses", "losses_by_context"]


@dataclass(frozen=True)
class ContextLosses:
    """What `losses_by_context` measured; one entry for every context.

    Attributes:
        contexts: context lengths, in tokens, ascending.
        loss: mean loss in nats per token, the text being cut into windows of the context: the tokens at a window's
            beginning have little before them.
        perplexity: exp(loss).
        bits_per_byte: or None without `token_bytes`.
        late_loss: mean loss where every token has at least half of the context before it.
        num_tokens: predicted tokens, the same ones at every context and for both losses.
    """

    contexts: list[int]
    loss: list[float]
    perplexity: list[float]
    bits_per_byte: list[float | None]
    late_loss: list[float]
    num_tokens: int


def losses_by_context(
    model: TransformerLM,
    tokens: Tokens,
    contexts: Sequence[int],
    *,
    span: int = 2048,
    batch_size: int = 8,
    token_bytes: np.ndarray | None = None,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ContextLosses:
    """Evaluate the same tokens at several context lengths.

    A model that uses what is far away has a late loss that falls with the context; one that cannot go beyond the length
    it was trained with has one that rises there. The tokens are a whole number of windows of the longest context, after
    half of one that is only read.

    Cost: each token is read twice at every context, for the halves of windows that lie side by side and for those
    that lie over their borders.

    Args:
        model: a language model.
        tokens: flat token ids, any integer dtype.
        contexts: tokens in a window, even numbers, in any order.
        span: as for `evaluate`.
        batch_size: windows of the longest context read at a time; of shorter ones as many more as hold as many tokens.
        token_bytes: as for `evaluate`.
        max_tokens: predict at most so many tokens.
        on_progress: called as (tokens read, tokens to read in all).

    Raises:
        ValueError: no context, an odd one, or fewer tokens than one window and a half of the longest.
    """
    contexts = sorted(set(contexts))
    first, num_tokens = _common_tokens(len(tokens) - 1, contexts, max_tokens)
    total = sum(2 * num_tokens + context // 2 for context in contexts)
    done, results, late = 0, [], []
    for context in contexts:
        pair = []
        for start in (first, first - context // 2):
            part = stretch(tokens, start, first + num_tokens + 1)
            pair.append(
                evaluate(
                    model,
                    part,
                    context_length=context,
                    span=span,
                    batch_size=batch_size * max(1, min(span, contexts[-1]) // context),
                    token_bytes=token_bytes,
                    on_progress=_shifted(on_progress, done, total),
                )
            )
            done += len(part) - 1
        results.append(pair[0])
        late.append(_late_loss(pair, context // 2))
    return ContextLosses(
        contexts=contexts,
        loss=[result.loss for result in results],
        perplexity=[result.perplexity for result in results],
        bits_per_byte=[result.bits_per_byte for result in results],
        late_loss=late,
        num_tokens=num_tokens,
    )


def _common_tokens(available: int, contexts: list[int], max_tokens: int | None) -> tuple[int, int]:
    """The first predicted token that has half of the longest context before it, and how many are predicted."""
    if not contexts or contexts[0] < 1 or any(context % 2 for context in contexts):
        raise ValueError(f"expected contexts of an even number of tokens, found {contexts or 'none'}")
    longest = contexts[-1]
    allowed = available - longest // 2
    allowed = allowed if max_tokens is None else min(allowed, max_tokens)
    if allowed < longest:
        raise ValueError(
            f"expected at least {longest + longest // 2 + 1} tokens, of which {longest} to predict, for a context of "
            f"{longest}, found {available + 1} with {max(0, allowed)} to predict: choose shorter contexts, more text "
            "or a larger maximum of tokens"
        )
    return longest // 2, allowed - allowed % longest


def _late_loss(pair: list[Evaluation], half: int) -> float:
    """Mean loss over the second halves of windows, which together hold every token once."""
    sums, counts = 0.0, 0
    for result in pair:
        late = result.count_at_position[half:]
        sums += float((result.loss_at_position[half:] * late).sum())
        counts += int(late.sum())
    return sums / counts


def _shifted(
    on_progress: Callable[[int, int], None] | None, done: int, total: int
) -> Callable[[int, int], None] | None:
    """Progress of one evaluation as progress of all."""
    return None if on_progress is None else lambda tokens, _: on_progress(done + tokens, total)
