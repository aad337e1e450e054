"""Prompts: refused, padded, read into a state; and one token a row after them."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from polysketch.models import ModelState, TransformerLM

__all__ = ["finished_at", "next_logits", "prefill", "require_usable"]


def require_usable(prompts: Sequence[Sequence[int]], vocab_size: int, max_new_tokens: int, span: int) -> None:
    """Refuse prompts the model cannot read and counts that are not positive."""
    if max_new_tokens < 1 or span < 1:
        raise ValueError(f"expected max_new_tokens and span of at least 1, found {max_new_tokens} and {span}")
    if not prompts:
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


def finished_at(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def prefill(model: TransformerLM, prompts: Sequence[Sequence[int]], state: ModelState, span: int) -> Tensor:
    """Read the prompts into the state and return the logits (batch, vocab) of their last tokens."""
    device = next(model.parameters()).device
    ids, key_mask = _pad_left(prompts)
    for span_ids, span_mask in zip(ids.split(span, dim=1), key_mask.split(span, dim=1), strict=True):
        mask = None if bool(span_mask.all()) else span_mask.to(device)
        hidden, _ = model.extend_hidden(span_ids.to(device), state, key_mask=mask)
    return model.logits(hidden[:, -1:])[:, 0]


def next_logits(model: TransformerLM, state: ModelState, chosen: Tensor) -> Tensor:
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
