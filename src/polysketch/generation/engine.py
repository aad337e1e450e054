"""Continue prompts with a language model whose state does not grow. Token ids in, token ids out: no text here."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from polysketch.generation import captured
from polysketch.generation.prompts import as_ids, finished_at, next_logits, prefill, require_stop, require_usable
from polysketch.generation.randomness import RowUniforms
from polysketch.generation.rows import Rows
from polysketch.generation.sampling import Sampler, tokens_seen
from polysketch.generation.state_tensors import named_tensors
from polysketch.models import ModelState, TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["GenerationResult", "generate"]

_ENDS_APART = (
    "expected rows of a given state to end together, found several rows that `stop` or `on_token` may end apart: a row "
    "that has ended would read on while the others run; give each row a state of its own, or use `Engine`"
)

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
        steps: calls of the model after the prompts.
    """

    tokens: list[list[int]]
    stopped: list[bool]
    tokens_per_second: float
    prefill_seconds: float
    state_bytes: int
    no_graph: str | None
    steps: int


def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    samples: Sequence[int] | None = None,
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
        repetition_penalty: see `Sampler`. Tokens of a prompt and of its continuation count as seen; those that `state`
            has read do not.
        seed: of the random draws.
        samples: which sample of its prompt each row is, as for `Request`. Default: how many equal prompts stand before
            it.
        stop: a token id that ends its row, for instance end of text, or several. Default: none.
        on_token: called as (row, token id) for every new token as soon as it is known, not for a stop id. Where it
            returns True the row ends, with that token.
        state: what to go on from, moved on in place; its rows are those of the prompts. It has then read the prompts
            and every new token, but the last where `max_new_tokens` or `on_token` was the end: `state.position` counts
            them. Several rows have to end together. Default: nothing was read.
        span: prompt tokens read at a time; bounds the memory of long prompts.
        graph: replay a captured CUDA graph for every token (`CapturedStep`): "auto" where that is possible and there
            are enough tokens; True insists; False never.

    Raises:
        RuntimeError: graph=True, and why there can be none.
        TypeError: `stop` holds what is no token id, or a setting is of another type.
        ValueError: no prompt, an empty prompt, an id outside the vocabulary, a setting out of range, logits that are
            not finite, or rows of a given state that end apart.
    """
    sampler = Sampler(temperature, top_k, top_p, repetition_penalty)
    prompts = [as_ids(prompt) for prompt in prompts]
    if samples is not None and len(samples) != len(prompts):
        raise ValueError(f"expected a sample number for each of {len(prompts)} prompts, found {len(samples)}")
    require_usable(prompts, model.config.vocab_size, max_new_tokens, span)
    require_stop(stop, model.config.vocab_size)
    rows = Rows(len(prompts), stop, on_token)
    uniforms = RowUniforms(prompts, seed, samples)
    given = state is not None
    if given and stop is not None and len(prompts) > 1:
        raise ValueError(_ENDS_APART)
    with _without_gradients(state), evaluation_mode(model):
        step, state, no_graph = _stepper(model, len(prompts), state, graph, max_new_tokens - 1)
        started = finished_at(next(model.parameters()).device)
        logits = prefill(model, prompts, state, span)
        prefilled = finished_at(logits.device)
        seen = tokens_seen(prompts, logits.shape[-1], logits.device) if sampler.looks_back else None
        for steps in range(max_new_tokens):
            chosen = sampler.choose(logits, uniforms.next().to(logits.device), seen)
            if seen is not None:
                seen.scatter_(1, chosen.unsqueeze(1), True)
            rows.add(chosen.tolist())
            if steps == max_new_tokens - 1 or rows.all_stopped:
                break
            if given and any(rows.stopped):
                raise ValueError(_ENDS_APART)
            logits = step(chosen)
        seconds = time.perf_counter() - prefilled
    speed = rows.num_tokens / seconds
    return GenerationResult(rows.tokens, rows.stopped, speed, prefilled - started, state.nbytes, no_graph, steps)


def _without_gradients(state: ModelState | None) -> torch.inference_mode | torch.no_grad:
    """Inference mode, but not where a state is given that is used outside: what is made there is used nowhere else."""
    if state is None or any(tensor.is_inference() for tensor in named_tensors(state).values()):
        return torch.inference_mode()
    return torch.no_grad()


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
    return partial(next_logits, model, state), state, reason
