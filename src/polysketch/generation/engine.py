"""Continue prompts with a language model whose state does not grow. Token ids in, token ids out: no text here."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from polysketch.generation import captured
from polysketch.generation.randomness import RowUniforms
from polysketch.generation.sampling import Sampler
from polysketch.models import ModelState, TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["GenerationResult", "generate"]

_WORTH_A_GRAPH = 16
"""Steps. Capturing takes the time of a few."""


@dataclass(frozen=True)
class GenerationResult:
    """What `generate` made.

    Attributes:
        tokens: for every prompt the new token ids, without the prompt and without a stop id.
        stopped: for every prompt whether a stop id or `on_token` ended it, rather than max_new_tokens.
        tokens_per_second: new tokens of all prompts together, over the seconds from the end of the prompts on.
        prefill_seconds: time to read the prompts.
        state_bytes: size of the state carried from token to token, all prompts together.
        no_graph: why steps were launched operation by operation; None where a captured graph was replayed.
    """

    tokens: list[list[int]]
    stopped: list[bool]
    tokens_per_second: float
    prefill_seconds: float
    state_bytes: int
    no_graph: str | None


@torch.inference_mode()
def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | Collection[int] | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    state: ModelState | None = None,
    span: int = 512,
    graph: bool | Literal["auto"] = "auto",
) -> GenerationResult:
    """Continue every prompt by up to `max_new_tokens` tokens, all prompts in one batch.

    Prompts of different lengths are padded on the left, where padding changes nothing. The tokens of a prompt are a
    function of the model, the prompt, the settings and `seed`: not of the other prompts in the batch. (Rounding may
    differ between batch sizes, and so, very rarely, may a token.) Equal prompts get different continuations.

    Cost: prompts are read `span` tokens at a time, then one step a token; with a linear mechanism neither the time of
    a step nor the state depends on what came before.

    Args:
        model: a language model; every module's training mode is restored.
        prompts: token ids, at least one in every prompt.
        max_new_tokens: at least 1.
        temperature: see `Sampler`; 0 is greedy.
        top_k: see `Sampler`.
        top_p: see `Sampler`.
        seed: of the random draws.
        stop: a token id that ends its row, for instance end of text, or several. Default: none.
        on_token: called as (row, token id) for every new token as soon as it is known, not for a stop id. Where it
            returns True the row ends, with that token.
        state: what to go on from, moved on in place; its rows are those of the prompts. It has then read the prompts
            and every new token but the last: `state.position` counts them. Default: nothing was read.
        span: prompt tokens read at a time; bounds the memory of long prompts.
        graph: replay a captured CUDA graph for every token (`CapturedStep`): "auto" where that is possible and there
            are enough tokens; True insists; False never.

    Raises:
        RuntimeError: graph=True, and why there can be none.
        ValueError: no prompt, an empty prompt, an id outside the vocabulary, a setting out of range, or logits that are
            not finite.
    """
    sampler = Sampler(temperature, top_k, top_p)
    _require_usable(prompts, model.config.vocab_size, max_new_tokens, span)
    rows = _Rows(len(prompts), stop, on_token)
    uniforms = RowUniforms(prompts, seed)
    with evaluation_mode(model):
        step, state, no_graph = _stepper(model, len(prompts), state, graph, max_new_tokens - 1)
        started = _finished(next(model.parameters()).device)
        logits = _prefill(model, prompts, state, span)
        prefilled = _finished(logits.device)
        for remaining in reversed(range(max_new_tokens)):
            chosen = sampler.choose(logits, uniforms.next().to(logits.device))
            rows.add(chosen.tolist())
            if remaining == 0 or rows.all_stopped:
                break
            logits = step(chosen)
        seconds = time.perf_counter() - prefilled
    speed = rows.num_tokens / seconds
    return GenerationResult(rows.tokens, rows.stopped, speed, prefilled - started, state.nbytes, no_graph)


class _Rows:
    """The tokens of every row so far, and which rows have ended."""

    def __init__(
        self,
        num_rows: int,
        stop: int | Collection[int] | None,
        on_token: Callable[[int, int], bool | None] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.stopped = [False] * num_rows
        self._stop = () if stop is None else (stop,) if isinstance(stop, int) else frozenset(stop)
        self._on_token = on_token

    def add(self, chosen: list[int]) -> None:
        """Append one token to every row that has not ended; a row that has ended goes on in the batch, unheard."""
        for row, token in enumerate(chosen):
            self.stopped[row] = self.stopped[row] or token in self._stop
            if self.stopped[row]:
                continue
            self.tokens[row].append(token)
            if self._on_token is not None:
                self.stopped[row] = self._on_token(row, token) is True

    @property
    def all_stopped(self) -> bool:
        """Whether no row takes another token."""
        return all(self.stopped)

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row) for row in self.tokens)


def _stepper(
    model: TransformerLM, num_rows: int, given: ModelState | None, graph: bool | Literal["auto"], steps: int
) -> tuple[Callable[[Tensor], Tensor], ModelState, str | None]:
    """What takes a step, the state that it moves on, before the first token, and why it is no graph."""
    state = model.init_state(num_rows) if given is None else given
    if len(state.position) != num_rows:
        raise ValueError(f"expected a state of {num_rows} rows, as many as prompts, found {len(state.position)}")
    reason = "graph=False" if graph is False else captured.why_no_graph(model, state)
    if given is not None:
        reason = reason or "a capture would move the given state"
    if reason is None and graph == "auto" and steps < _WORTH_A_GRAPH:
        reason = f"{steps} steps are not worth a capture"
    if reason is None:
        try:
            return captured.CapturedStep(model, state), state, None
        except RuntimeError as error:  # what a device's library says of an operation it cannot capture
            reason, state = f"the capture failed: {error}", model.init_state(num_rows)
    if graph is True:
        raise RuntimeError(f"graph=True, but a step cannot be captured: {reason}")
    return partial(_step, model, state), state, reason


def _finished(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prefill(model: TransformerLM, prompts: Sequence[Sequence[int]], state: ModelState, span: int) -> Tensor:
    """Read the prompts into the state and return the logits (batch, vocab) of their last tokens."""
    device = next(model.parameters()).device
    ids, key_mask = _pad_left(prompts)
    for span_ids, span_mask in zip(ids.split(span, dim=1), key_mask.split(span, dim=1), strict=True):
        mask = None if bool(span_mask.all()) else span_mask.to(device)
        hidden, _ = model.extend_hidden(span_ids.to(device), state, key_mask=mask)
    return model.logits(hidden[:, -1:])[:, 0]


def _step(model: TransformerLM, state: ModelState, chosen: Tensor) -> Tensor:
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


def _require_usable(prompts: Sequence[Sequence[int]], vocab_size: int, max_new_tokens: int, span: int) -> None:
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
