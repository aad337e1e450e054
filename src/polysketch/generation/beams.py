"""Beam search: the most probable continuations that a few candidates find, instead of one greedy path."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polysketch.generation.prompts import finished_at, next_logits, prefill, require_stop, require_usable
from polysketch.generation.rows import ids_of
from polysketch.generation.sampling import require_finite
from polysketch.models import GivenSource, TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["Beam", "BeamSearchResult", "beam_search"]


@dataclass(frozen=True)
class Beam:
    """One continuation.

    Attributes:
        tokens: new token ids, without a stop id.
        score: log-probability of the tokens, a stop id included, over their number to the power of the length penalty.
        stopped: whether a stop id ended it, rather than max_new_tokens.
    """

    tokens: list[int]
    score: float
    stopped: bool


@dataclass(frozen=True)
class BeamSearchResult:
    """What `beam_search` found.

    Attributes:
        beams: for every prompt its continuations, the best first; at most `num_beams`.
        prefill_seconds: time to read the prompts.
        seconds: time from the end of the prompts on.
        state_bytes: size of the state carried from token to token, all prompts and beams together.
        steps: calls of the model after the prompts.
    """

    beams: list[list[Beam]]
    prefill_seconds: float
    seconds: float
    state_bytes: int
    steps: int


@torch.inference_mode()
def beam_search(
    model: TransformerLM | GivenSource,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    stop: int | Collection[int] | None = None,
    span: int = 512,
) -> BeamSearchResult:
    """Continue every prompt by its most probable continuations, as far as `num_beams` candidates find them.

    Nothing is drawn. The rules are those of transformers' `generate(num_beams=...)`, which gives the same beams.

    Cost: a step of `num_beams` rows for every token and prompt, and a copy of the states wherever candidates change
    places. With a constant state neither grows with the text.

    Args:
        model: a language model, or a decoder with its source; every module's training mode is restored.
        prompts: token ids, at least one in every prompt.
        max_new_tokens: at least 1.
        num_beams: candidates kept for every prompt, from 1 to 65,536; 1 is greedy.
        length_penalty: above 0 favours long continuations, below 0 short ones, from -20 to 20; see `Beam.score`.
        early_stopping: end a prompt as soon as `num_beams` candidates have ended. Default: when no running candidate
            has a better score than the worst that has ended. The third rule of transformers, "never", is not there.
        stop: a token id that ends a continuation, or several. Default: none.
        span: prompt tokens read at a time.

    Raises:
        TypeError: `stop` holds what is no token id, a count is no whole number, or `early_stopping` no bool.
        ValueError: no prompt, an empty prompt, an id outside the vocabulary, a setting out of range, or logits that are
            not finite.
    """
    require_usable(prompts, model.config.vocab_size, max_new_tokens, span)
    require_stop(stop, model.config.vocab_size)
    rules = _Rules(num_beams, max_new_tokens, length_penalty, early_stopping, ids_of(stop))
    searches = [_Search(rules) for _ in prompts]
    with evaluation_mode(model):
        state = model.init_state(len(prompts))
        started = finished_at(next(model.parameters()).device)
        logits = prefill(model, prompts, state, span)
        prefilled = finished_at(logits.device)
        rows = torch.arange(len(prompts)).repeat_interleave(num_beams)
        state, logits = state.reorder(rows), logits[rows.to(logits.device)]
        reader = model.reordered(rows) if isinstance(model, GivenSource) else model
        steps = 0
        while True:
            parents, tokens = _take(searches, _log_probabilities(logits))
            if all(search.ended for search in searches):
                break
            if not torch.equal(parents, torch.arange(len(parents))):
                state = state.reorder(parents)
            logits = next_logits(reader, state, tokens.to(logits.device))
            steps += 1
        seconds = time.perf_counter() - prefilled
    return BeamSearchResult([search.found for search in searches], prefilled - started, seconds, state.nbytes, steps)


_MOST_BEAMS = 2**16  # each has a state, and is a row of every step
_LARGEST_PENALTY = 20  # a power of the length that is a number in float64, however long the text


@dataclass(frozen=True)
class _Rules:
    """What all prompts share; attributes as the arguments of `beam_search`."""

    num_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: bool
    stop_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ValueError(f"expected num_beams of at least 1, found {self.num_beams}")
        if self.num_beams > _MOST_BEAMS:
            raise ValueError(f"expected num_beams of at most {_MOST_BEAMS:,}, found {self.num_beams}")
        if not -_LARGEST_PENALTY <= self.length_penalty <= _LARGEST_PENALTY:
            bounds = f"from -{_LARGEST_PENALTY} to {_LARGEST_PENALTY}"
            raise ValueError(f"expected a length_penalty {bounds}, found {self.length_penalty}")
        if not isinstance(self.early_stopping, bool):
            raise TypeError(f"early_stopping: expected True or False, found {self.early_stopping!r}")

    @property
    def num_candidates(self) -> int:
        """So many that `num_beams` remain even where every other one ends with a stop id."""
        return max(2, 1 + len(self.stop_ids)) * self.num_beams

    def score(self, log_probability: float, length: int) -> float:
        """The score of so many tokens."""
        return log_probability / length**self.length_penalty


@dataclass
class _Search:
    """The candidates of one prompt: those that run, in the order of the rows, and those that have ended."""

    rules: _Rules
    running: list[list[int]] = field(init=False)
    sums: Tensor = field(init=False)
    found: list[Beam] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        """All rows are alike before the first token: only the first may be gone on with."""
        self.running = [[] for _ in range(self.rules.num_beams)]
        self.sums = torch.full((self.rules.num_beams,), -math.inf)
        self.sums[0] = 0

    def take(self, log_probabilities: Tensor) -> tuple[list[int], list[int]]:
        """Go on by one token, given (num_beams, vocab).

        Returns:
            For every row which row it goes on from, and with which token.
        """
        vocab_size = log_probabilities.shape[1]
        sums = (self.sums[:, None] + log_probabilities).flatten()
        best = sums.topk(min(self.rules.num_candidates, len(sums)))
        places = [divmod(place, vocab_size) for place in best.indices.tolist()]
        length = len(self.running[0]) + 1
        kept = []
        for rank, (total, (row, token)) in enumerate(zip(best.values.tolist(), places, strict=True)):
            stops = token in self.rules.stop_ids
            if rank < self.rules.num_beams and (stops or length == self.rules.max_new_tokens):
                self._end(self.running[row] + [token] * (not stops), total, length, stops)
            if not stops:
                kept.append((total, row, token))
        return self._go_on(kept[: self.rules.num_beams], length)

    def _end(self, tokens: list[int], total: float, length: int, stopped: bool) -> None:
        """Keep a candidate that has ended, if it is among the best."""
        if total > -math.inf:
            self.found.append(Beam(tokens, self.rules.score(total, length), stopped))
            self.found.sort(key=lambda beam: -beam.score)
            del self.found[self.rules.num_beams :]

    def _go_on(self, kept: list[tuple[float, int, int]], length: int) -> tuple[list[int], list[int]]:
        # Fewer than the rows where almost every token of a small vocabulary ends a text: the rest cannot come back.
        kept = kept + [(-math.inf, 0, 0)] * (self.rules.num_beams - len(kept))
        self.running = [[*self.running[row], token] for _, row, token in kept]
        self.sums = torch.tensor([total for total, _, _ in kept])
        full = len(self.found) == self.rules.num_beams
        hopeless = full and self.rules.score(kept[0][0], length) <= self.found[-1].score
        self.ended = length == self.rules.max_new_tokens or hopeless or (full and self.rules.early_stopping)
        return [row for _, row, _ in kept], [token for _, _, token in kept]


def _log_probabilities(logits: Tensor) -> Tensor:
    """(rows, vocab) float32 in host memory, where candidates are kept."""
    require_finite(logits)
    return logits.float().log_softmax(dim=-1).cpu()


def _take(searches: Sequence[_Search], log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """A token more in every search that goes on: rows of the whole batch to go on from, and their tokens."""
    parents: list[int] = []
    tokens: list[int] = []
    for search, own in zip(searches, log_probabilities.chunk(len(searches)), strict=True):
        first, width = len(parents), len(own)
        rows, chosen = (range(width), [0] * width) if search.ended else search.take(own)
        parents += [first + row for row in rows]
        tokens += chosen
    return torch.tensor(parents), torch.tensor(tokens)
