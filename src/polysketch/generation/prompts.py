"""Prompts: refused, padded, read into a state; and one token a row after them."""

import operator
import time
from collections.abc import Collection, Sequence
from numbers import Integral

import torch
from torch import Tensor

from polysketch.generation.rows import ids_of
from polysketch.models import GivenSource, ModelState, TransformerLM

__all__ = ["as_ids", "finished_at", "next_logits", "prefill", "require_stop", "require_usable"]


def require_usable(prompts: Sequence[Sequence[int]], vocab_size: int, max_new_tokens: int, span: int) -> None:
    """Refuse prompts the model cannot read and counts that are not positive."""
    for name, count in (("max_new_tokens", max_new_tokens), ("span", span)):
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"{name}: expected a whole number, found {count!r}")
    if max_new_tokens < 1 or span < 1:
        raise ValueError(f"expected max_new_tokens and span of at least 1, found {max_new_tokens} and {span}")
    if len(prompts) == 0:
        raise ValueError("expected at least one prompt, found none")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"expected at least one token in prompt {row}, found none: begin with the end-of-text token"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"expected token ids from 0 to {vocab_size - 1}, found {min(prompt)} to {max(prompt)} in prompt {row}: "
                "it was probably encoded with another tokenizer than the model's"
            )


def as_ids(prompt: Sequence[int] | Tensor) -> list[int]:
    """A prompt in Python's own numbers, which random draws are seeded by.

    Raises:
        TypeError: what is in it is no whole number.
    """
    try:
        return list(map(operator.index, prompt.tolist() if isinstance(prompt, Tensor) else prompt))
    except TypeError as error:
        raise TypeError(f"expected token ids, which are whole numbers, in a prompt: {error}") from None


def require_stop(stop: int | Collection[int] | None, vocab_size: int) -> None:
    """Refuse what ends no text: a string, or an id that the model cannot write.

    Raises:
        TypeError: no id, and no collection of ids.
        ValueError: an id outside the vocabulary.
    """
    if isinstance(stop, str | bytes) or not (stop is None or isinstance(stop, int | Collection | Tensor)):
        raise TypeError(f"stop: expected a token id or several, found {stop!r}: `TextStream` ends a text at a string")
    for token in ids_of(stop):
        if type(token) is not int:
            raise TypeError(f"stop: expected token ids, which are whole numbers, found {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop: expected token ids from 0 to {vocab_size - 1}, found {token}")


def finished_at(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def prefill(
    model: TransformerLM | GivenSource, prompts: Sequence[Sequence[int]], state: ModelState, span: int
) -> Tensor:
    """Read the prompts into the state and return the logits (batch, vocab) of their last tokens."""
    device = next(model.parameters()).device
    ids, key_mask = _pad_left(prompts)
    for span_ids, span_mask in zip(ids.split(span, dim=1), key_mask.split(span, dim=1), strict=True):
        mask = None if bool(span_mask.all()) else span_mask.to(device)
        hidden, _ = model.extend_hidden(span_ids.to(device), state, key_mask=mask)
    return model.logits(hidden[:, -1:])[:, 0]


def next_logits(model: TransformerLM | GivenSource, state: ModelState, chosen: Tensor) -> Tensor:
    """Feed one token a row and return the logits (batch, vocab) of the next."""
    logits, _ = model.extend(chosen.unsqueeze(1), state)
    return logits[:, -1]


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ids (batch, longest), int64, zeros before the shorter prompts, and a mask that is true on real tokens."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    key_mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.int64)
        key_mask[row, longest - len(prompt) :] = True
    return ids, key_mask
