"""Assisted decoding: something cheap guesses several tokens, and the model reads them at once.

The guesses change the speed, never the text: a guess is taken only where it is the token that would have been chosen.
Source: Leviathan, Kalman and Matias 2023, with the draws of a position shared by guess and choice in place of their
acceptance rule, so that a seed gives the text that it gives without guesses.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from polysketch.generation.engine import GenerationResult
from polysketch.generation.prompts import as_ids, finished_at, next_logits, prefill, require_stop, require_usable
from polysketch.generation.randomness import PromptUniforms
from polysketch.generation.rows import Rows
from polysketch.generation.sampling import Sampler, tokens_seen
from polysketch.models import ModelState, TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["AssistantDrafts", "Drafter", "PromptLookup", "generate_with_drafts"]

_MOST_WAITING = 16
"""Tokens that may be read again with each guess, before the state takes them for good."""


class Drafter(Protocol):
    """Guesses the tokens that come next.

    Attributes:
        num_tokens: most tokens of a guess, at least 1.
    """

    num_tokens: int

    def begin(self) -> None:
        """Forget the text before: another one begins."""

    def draft(self, text: Sequence[int], sampler: Sampler, uniforms: Tensor) -> list[int]:
        """Guess what follows.

        Args:
            text: prompt and new tokens; it begins with the text of the call before.
            sampler: how the model's tokens are chosen.
            uniforms: (tokens,) float64, the random numbers by which the next tokens are chosen.

        Returns:
            At most len(uniforms) token ids.
        """


class PromptLookup:
    """Guesses that the text repeats itself: what followed the last time that its last tokens stood there.

    Costs no model. Good where answers quote the prompt: summaries, edits, code. Source: Saxena 2023, prompt lookup.

    Args:
        num_tokens: of a guess.
        longest_match: last tokens that must agree; fewer are tried where they do not.
    """

    def __init__(self, num_tokens: int = 10, longest_match: int = 3) -> None:
        if num_tokens < 1 or longest_match < 1:
            raise ValueError(f"expected at least 1 token, found num_tokens={num_tokens}, {longest_match=}")
        self.num_tokens, self.longest_match = num_tokens, longest_match
        self.begin()

    def begin(self) -> None:
        """Forget the text before."""
        # For each run of tokens the place after its last two appearances: the last is the end of the text itself.
        self._after: dict[tuple[int, ...], tuple[int | None, int]] = {}
        self._seen = 0

    def draft(self, text: Sequence[int], sampler: Sampler, uniforms: Tensor) -> list[int]:
        """What stood after the longest match; nothing where there is none."""
        self._see(text)
        for length in range(min(self.longest_match, len(text) - 1), 0, -1):
            place = self._after[tuple(text[-length:])][0]
            if place is not None:
                return list(text[place : place + len(uniforms)])
        return []

    def _see(self, text: Sequence[int]) -> None:
        for end in range(self._seen + 1, len(text) + 1):
            for length in range(1, min(self.longest_match, end) + 1):
                run = tuple(text[end - length : end])
                self._after[run] = (self._after[run][1] if run in self._after else None, end)
        self._seen = len(text)


class AssistantDrafts:
    """Guesses by a smaller model of the same vocabulary.

    Args:
        model: the smaller one; every module's training mode is restored.
        num_tokens: of a guess.
    """

    def __init__(self, model: TransformerLM, num_tokens: int = 5) -> None:
        if num_tokens < 1:
            raise ValueError(f"expected num_tokens of at least 1, found {num_tokens}")
        self.model, self.num_tokens = model, num_tokens
        self.begin()

    def begin(self) -> None:
        """Forget the text before."""
        self._state, self._read = self.model.init_state(1), 0

    def draft(self, text: Sequence[int], sampler: Sampler, uniforms: Tensor) -> list[int]:
        """What the smaller model would write with the same random numbers."""
        with evaluation_mode(self.model):
            logits = prefill(self.model, [text[self._read :]], self._state, span=512)
            self._read = len(text)
            state = self._state.clone()
            guess: list[int] = []
            for uniform in uniforms.split(1):
                seen = _seen_after([*text, *guess], [], logits, sampler)
                token = sampler.choose(logits, uniform.to(logits.device), seen)
                guess.append(int(token))
                if len(guess) < len(uniforms):
                    logits = next_logits(self.model, state, token)
        return guess


@torch.inference_mode()
def generate_with_drafts(
    model: TransformerLM,
    prompt: Sequence[int],
    drafter: Drafter,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    sample: int = 0,
    stop: int | Collection[int] | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    span: int = 512,
) -> GenerationResult:
    """Continue one prompt as `generate` does, reading guessed tokens several at a time.

    The tokens are those of `generate` with the same settings and seed. (Rounding may differ, and so, very rarely, may a
    token.) `GenerationResult.steps` counts the calls of the model: the fewer, the better the guesses were.

    Cost: a call of the model for each guess. A state cannot give tokens back, so it is copied before each guess; after
    a wrong one the tokens that were right are read again together with the next guess.

    Args:
        model: a language model; every module's training mode is restored.
        prompt: token ids, at least one.
        drafter: what guesses: `PromptLookup`, `AssistantDrafts`.
        max_new_tokens: at least 1.
        temperature: see `Sampler`; 0 is greedy.
        top_k: see `Sampler`.
        top_p: see `Sampler`.
        repetition_penalty: see `Sampler`.
        seed: of the random draws.
        sample: which of several samples of this prompt, as for `Request`.
        stop: a token id that ends the text, or several. Default: none.
        on_token: as for `generate`; the row is 0.
        span: prompt tokens read at a time.

    Raises:
        TypeError: `stop` holds what is no token id, or a setting is of another type.
        ValueError: an empty prompt, an id outside the vocabulary, a setting out of range, or logits that are not
            finite.
    """
    prompt = as_ids(prompt)
    require_usable([prompt], model.config.vocab_size, max_new_tokens, span)
    require_stop(stop, model.config.vocab_size)
    sampler, rows = Sampler(temperature, top_k, top_p, repetition_penalty), Rows(1, stop, on_token)
    numbers = _Ahead(PromptUniforms(prompt, seed, sample))
    drafter.begin()
    with evaluation_mode(model):
        started = finished_at(next(model.parameters()).device)
        reader = _Reader(model)
        logits = prefill(model, [prompt], reader.state, span)
        prefilled = finished_at(logits.device)
        seen = _seen_after(prompt, [], logits, sampler)
        new = sampler.choose(logits, numbers.first(1).to(logits.device), seen).tolist()
        while not _add(rows, numbers, new, max_new_tokens):
            text = [*prompt, *rows.tokens[0]]
            count = min(drafter.num_tokens, max_new_tokens - rows.num_tokens - 1)
            guess = _guess(drafter, text, sampler, numbers.first(count), model.config.vocab_size)
            logits = reader.read(new[-1], guess)
            seen = _seen_after(text, guess, logits, sampler)
            chosen = sampler.choose(logits, numbers.first(len(guess) + 1).to(logits.device), seen).tolist()
            right = _num_equal(chosen, guess)
            reader.accept(right)
            new = chosen[: right + 1]
        seconds = time.perf_counter() - prefilled
    return GenerationResult(
        rows.tokens,
        rows.stopped,
        rows.num_tokens / seconds,
        prefilled - started,
        reader.state.nbytes,
        "guesses have lengths of their own",
        reader.calls,
    )


class _Reader:
    """The model's state, and the tokens of the text that it has not taken for good."""

    def __init__(self, model: TransformerLM) -> None:
        self._model, self.state = model, model.init_state(1)
        self._waiting: list[int] = []
        self._guess: list[int] = []
        self._before: ModelState | None = None
        self.calls = 0

    def read(self, last: int, guess: list[int]) -> Tensor:
        """(len(guess) + 1, vocab) logits after the text, whose last token is new, and after each guessed token."""
        if len(self._waiting) > _MOST_WAITING:
            self._extend(self._waiting)
            self._waiting = []
        self._waiting = [*self._waiting, last]
        self._guess, self._before = guess, self.state.clone() if guess else None
        return self._extend(self._waiting + guess)[0, -len(guess) - 1 :]

    def accept(self, right: int) -> None:
        """Keep so many guessed tokens, and take the others back."""
        if right == len(self._guess):
            self._waiting = []
        else:
            assert self._before is not None
            self.state = self._before
            self._waiting += self._guess[:right]

    def _extend(self, tokens: list[int]) -> Tensor:
        self.calls += 1
        ids = torch.tensor([tokens], device=next(self._model.parameters()).device)
        return self._model.extend(ids, self.state)[0]


class _Ahead:
    """Random numbers of the next tokens, looked at before they are used."""

    def __init__(self, uniforms: PromptUniforms) -> None:
        self._uniforms = uniforms
        self._drawn: deque[Tensor] = deque()

    def first(self, count: int) -> Tensor:
        """The next numbers, which stay: float64 (count,)."""
        while len(self._drawn) < count:
            self._drawn.append(self._uniforms.next())
        return torch.cat([torch.empty(0, dtype=torch.float64), *list(self._drawn)[:count]])

    def use(self) -> None:
        """The first one has chosen a token."""
        self._drawn.popleft()


def _add(rows: Rows, numbers: _Ahead, new: list[int], max_new_tokens: int) -> bool:
    """Tell the new tokens one by one; whether the text has ended."""
    for token in new:
        numbers.use()
        rows.add([token])
        if rows.all_stopped or rows.num_tokens == max_new_tokens:
            return True
    return False


def _guess(drafter: Drafter, text: list[int], sampler: Sampler, uniforms: Tensor, vocab_size: int) -> list[int]:
    """A guess of at most as many tokens as there are numbers, up to the first that is none of the model's."""
    guess = drafter.draft(text, sampler, uniforms)[: len(uniforms)] if len(uniforms) else []
    return guess[: next((place for place, token in enumerate(guess) if not 0 <= token < vocab_size), len(guess))]


def _seen_after(text: Sequence[int], guess: Sequence[int], logits: Tensor, sampler: Sampler) -> Tensor | None:
    """What is seen where each row of the (len(guess) + 1, vocab) logits stands; None where nobody asks."""
    if not sampler.looks_back:
        return None
    seen = tokens_seen([text], logits.shape[-1], logits.device).repeat(len(guess) + 1, 1)
    for place, token in enumerate(guess):
        seen[place + 1 :, token] = True
    return seen


def _num_equal(chosen: list[int], guess: list[int]) -> int:
    """Tokens before the first difference."""
    return next((place for place, token in enumerate(guess) if token != chosen[place]), len(guess))
