"""Needle retrieval: a fact hidden in a long text, asked for at its end.

One sentence, "The secret word of NAME is VALUE.", stands somewhere in a text that has nothing to do with it, and at the
end the same sentence begins again. The model is right if it gives the value that was hidden more probability than the
other values that might have been; so chance is known, and a small model can show that it looked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polysketch.data.tokens import Tokens
from polysketch.evaluation.reading import hidden_in_spans
from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["NAMES", "VALUES", "Needle", "NeedleResult", "make_needles", "needle_retrieval"]

NAMES = ("Anna", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Henry")
VALUES = (
    *("amber", "bronze", "copper", "diamond", "emerald"),
    *("flint", "golden", "honey", "ivory", "jasmine"),
    *("kettle", "lemon", "marble", "nickel", "orange"),
    *("pepper", "quartz", "ruby", "silver", "tiger"),
    *("umber", "violet", "walnut", "yellow", "zinc"),
)
SENTENCE = "\n\nThe secret word of {name} is {value}.\n\n"
PRIOR_TOKENS = 64
"""Tokens of text before the question when the prior of the values is measured."""


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, in token ids, for every value that it may hold.

    Attributes:
        question: what all the sentences begin with; the answer is the next token.
        answers: for every value the id that follows the question; all different.
        statements: for every value the whole sentence.
    """

    question: list[int]
    answers: list[int]
    statements: list[list[int]]


@dataclass(frozen=True)
class NeedleResult:
    """What `needle_retrieval` measured; arrays are float64 of shape (lengths, depths).

    Attributes:
        lengths: tokens read before the answer, the question included.
        depths: where the needle stood: 0 the beginning of the text, 1 right before the question.
        accuracy: share of trials where the hidden value gained more than every other from being hidden.
        margin: by how much the hidden value gained more than the mean of the others, in nats, mean over trials.
        exact: share of trials where the answer was the most probable token of the whole vocabulary.
        chance: what `accuracy` is without looking.
        num_trials: trials behind every figure.
    """

    lengths: list[int]
    depths: list[float]
    accuracy: np.ndarray
    margin: np.ndarray
    exact: np.ndarray
    chance: float
    num_trials: int


def make_needles(encode: Callable[[str], Sequence[int]], *, num_values: int = 8) -> list[Needle]:
    """The needles of every name, in the ids of a tokenizer.

    The sentences of one name are encoded whole and split where they begin to differ, so that the question at the end
    has the ids that it has in the hidden sentence, whatever the tokenizer.

    Args:
        encode: text to ids, without special tokens.
        num_values: how many values compete; chance is one in so many.

    Raises:
        ValueError: fewer than two values, or the tokenizer does not tell so many values apart by one token.
    """
    if not 2 <= num_values <= len(VALUES):
        raise ValueError(f"expected 2 to {len(VALUES)} values for a needle, found {num_values}")
    return [_make_needle(encode, name, num_values) for name in NAMES]


def needle_retrieval(
    model: TransformerLM,
    haystack: Tokens,
    needles: Sequence[Needle],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    num_trials: int = 16,
    batch_size: int = 8,
    span: int = 2048,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> NeedleResult:
    """Measure retrieval at every length and depth.

    A trial hides one value of one needle in a stretch of `haystack` drawn at random; values take turns, so that each is
    hidden equally often. The score of a value is the log-probability of its token after the question, minus the same
    after the last 64 tokens of text alone: what a model says of a word in any text does not count.

    Contexts are read `span` tokens at a time with the model's state carried along: memory grows with the length only
    where the state does. Where the mechanism estimates, as `hyper` does, a context is read at once. Cost: num_trials
    times the sum of lengths times the number of depths, in tokens.

    Args:
        model: a language model; its training mode is restored.
        haystack: flat token ids, any integer dtype, for instance the test split of prepared data.
        needles: of `make_needles`.
        lengths: tokens of a context, the question included.
        depths: in [0, 1].
        num_trials: trials at every length and depth.
        batch_size: contexts read at a time.
        span: tokens read at a time.
        seed: of stretches, names and values; the same trials at every depth.
        on_progress: called as (cells done, cells in all).

    Raises:
        ValueError: a length that does not hold the needle and the question, more tokens than the haystack has, a depth
            outside [0, 1], or a size below 1.
    """
    _check(haystack, needles, lengths, depths, num_trials, batch_size, span)
    cells = np.zeros((3, len(lengths), len(depths)))
    with evaluation_mode(model), torch.inference_mode():
        for row, length in enumerate(lengths):
            trials = _Trials.draw(needles, length, num_trials, len(haystack), seed)
            prior, _ = _scores(model, trials.priors(haystack), trials.answers, batch_size, span)
            for column, depth in enumerate(depths):
                scores, best = _scores(model, trials.contexts(haystack, depth), trials.answers, batch_size, span)
                exact = best == trials.answers[np.arange(num_trials), trials.hidden]
                cells[:, row, column] = *_judge(scores - prior, trials.hidden), exact.mean()
                if on_progress is not None:
                    on_progress(row * len(depths) + column + 1, len(lengths) * len(depths))
    chance = 1 / len(needles[0].answers)
    return NeedleResult(list(lengths), list(depths), cells[0], cells[1], cells[2], chance, num_trials)


@dataclass(frozen=True)
class _Trials:
    """What is hidden and asked in each trial of one length, and which stretch of the haystack it takes."""

    length: int
    chosen: list[Needle]
    hidden: np.ndarray
    starts: np.ndarray

    @classmethod
    def draw(cls, needles: Sequence[Needle], length: int, num_trials: int, num_tokens: int, seed: int) -> "_Trials":
        generator = np.random.default_rng([seed, length])
        num_values = len(needles[0].answers)
        hidden = generator.permutation(num_trials) % num_values
        chosen = [needles[index] for index in generator.integers(len(needles), size=num_trials)]
        return cls(length, chosen, hidden, generator.integers(num_tokens - length + 1, size=num_trials))

    @property
    def answers(self) -> np.ndarray:
        """The id of every value, int64 (trials, values)."""
        return np.array([needle.answers for needle in self.chosen])

    def contexts(self, haystack: Tokens, depth: float) -> np.ndarray:
        """Contexts with their needle at `depth`, int64 (trials, length)."""
        rows = []
        for needle, value, start in zip(self.chosen, self.hidden, self.starts, strict=True):
            statement = needle.statements[value]
            text = haystack[start + len(statement) + len(needle.question) : start + self.length]
            cut = round(depth * len(text))
            rows.append(np.concatenate([text[:cut], statement, text[cut:], needle.question]))
        return np.stack(rows).astype(np.int64)

    def priors(self, haystack: Tokens) -> np.ndarray:
        """The question after a little of the same text without a needle, int64 (trials, tokens), left to right."""
        longest = max(len(needle.question) for needle in self.chosen)
        rows = []
        for needle, start in zip(self.chosen, self.starts, strict=True):
            tokens = min(PRIOR_TOKENS, self.length - longest) + longest - len(needle.question)
            text = haystack[start + self.length - tokens : start + self.length]
            rows.append(np.concatenate([text, needle.question]))
        return np.stack(rows).astype(np.int64)


def _scores(
    model: TransformerLM, contexts: np.ndarray, answers: np.ndarray, batch_size: int, span: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of every value (trials, values), and the most probable id of all (trials,)."""
    device = next(model.parameters()).device
    scores, best = [], []
    for first in range(0, len(contexts), batch_size):
        rows = torch.from_numpy(contexts[first : first + batch_size]).to(device)
        log_probabilities = _next_token(model, rows, span).double().cpu().numpy()
        scores.append(np.take_along_axis(log_probabilities, answers[first : first + batch_size], axis=1))
        best.append(log_probabilities.argmax(axis=1))
    return np.concatenate(scores), np.concatenate(best)


def _next_token(model: TransformerLM, ids: Tensor, span: int) -> Tensor:
    """Log-probabilities (batch, vocabulary) of what follows, read span by span."""
    for hidden in hidden_in_spans(model, ids, span):
        last = hidden[:, -1:]
    return model.logits(last)[:, 0].float().log_softmax(-1)


def _judge(gains: np.ndarray, hidden: np.ndarray) -> tuple[float, float]:
    """(accuracy, margin) of a cell. A tie is no retrieval: who gives all values the same does not know."""
    trials, num_values = np.arange(len(hidden)), gains.shape[1]
    right = gains[trials, hidden]
    margin = right - (gains.sum(axis=1) - right) / (num_values - 1)
    others = gains.copy()
    others[trials, hidden] = -np.inf
    return float((right > others.max(axis=1)).mean()), float(margin.mean())


def _make_needle(encode: Callable[[str], Sequence[int]], name: str, num_values: int) -> Needle:
    """The needle of one name: sentences that share a beginning, after which each goes on with another token.

    Of all beginnings the one with the most continuations is the question, the shortest of equals: a tokenizer may have
    a token for some of the words with their space, and take the space alone before others.
    """
    branches: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for value in VALUES:
        sentence = list(encode(SENTENCE.format(name=name, value=value)))
        for end in range(len(sentence)):
            branches.setdefault(tuple(sentence[:end]), {}).setdefault(sentence[end], sentence)
    question = max(branches, key=lambda beginning: (len(branches[beginning]), -len(beginning)))
    if len(branches[question]) < num_values:
        raise ValueError(
            f"expected a tokenizer that tells {num_values} words apart by one token, found one that tells "
            f"{len(branches[question])} apart: ask for fewer values"
        )
    answers = dict(list(branches[question].items())[:num_values])
    return Needle(list(question), list(answers), list(answers.values()))


def _check(
    haystack: Tokens,
    needles: Sequence[Needle],
    lengths: Sequence[int],
    depths: Sequence[float],
    num_trials: int,
    batch_size: int,
    span: int,
) -> None:
    if not (needles and lengths and depths) or min(num_trials, batch_size, span) < 1:
        raise ValueError("expected at least one needle, length, depth, trial, row of a batch and token of a span")
    smallest = 1 + max(len(needle.question) + max(map(len, needle.statements)) for needle in needles)
    if min(lengths) < smallest:
        raise ValueError(
            f"expected lengths of at least {smallest} tokens, which hold the needle and the question, "
            f"found {min(lengths)}"
        )
    if max(lengths) > len(haystack):
        raise ValueError(
            f"expected a text of at least {max(lengths)} tokens to hide needles in, found {len(haystack)}: "
            "choose shorter lengths or more text"
        )
    if min(depths) < 0 or max(depths) > 1:
        raise ValueError(f"expected depths from 0 (the beginning) to 1 (the end), found {min(depths)} to {max(depths)}")
