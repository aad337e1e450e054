"""A needle of five words: hidden in a text, asked for at its end, and asked for without having been there."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from polysketch.data import PreparedData
from polysketch.evaluation.needle import VALUES
from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode

NUM_WORDS = 5
QUESTION = "\n\nThe five secret words are"
CONTROL = "none"
"""What the question without a needle is called."""

_END = ".\n\n"
_SPAN = 1024
_AT_ONCE = 4
_SEED = 0  # of the words


@dataclass(frozen=True)
class FiveWords:
    """One needle, in token ids. The question at the end has the ids that it has in the hidden sentence.

    Attributes:
        question: what the sentence begins with.
        words: the ids of each word.
        end: what the sentence ends with.
    """

    question: list[int]
    words: list[list[int]]
    end: list[int]

    @property
    def answer(self) -> list[int]:
        """The ids of all words."""
        return [token for word in self.words for token in word]

    @property
    def sentence(self) -> list[int]:
        """What is hidden."""
        return [*self.question, *self.answer, *self.end]


def draw_needle(encode: Callable[[str], Sequence[int]], generator: np.random.Generator) -> FiveWords:
    """A needle of five different words of the library's list, drawn uniformly.

    Args:
        encode: text to ids, without special tokens.
        generator: of the words.

    Raises:
        ValueError: the tokenizer joins a word with what stands before or after it.
    """
    texts = [QUESTION, *(f" {VALUES[index]}" for index in generator.permutation(len(VALUES))[:NUM_WORDS]), _END]
    begun = [list(encode("".join(texts[: count + 1]))) for count in range(len(texts))]
    if any(longer[: len(shorter)] != shorter for shorter, longer in pairwise(begun)):
        raise ValueError("expected a tokenizer that splits text before each word, found one that joins words")
    parts = [longer[len(shorter) :] for shorter, longer in pairwise([[], *begun])]
    return FiveWords(parts[0], parts[1:-1], parts[-1])


def context(text: np.ndarray, needle: FiveWords, depth: float | None, length: int) -> np.ndarray:
    """The last tokens of a text with the needle in it, and the question behind: int64 (length,).

    Args:
        text: at least `length` tokens.
        needle: the needle.
        depth: 0 the beginning, 1 right before the question; None for no needle, with more of the text in its place.
        length: tokens in all.

    Raises:
        ValueError: the needle and the question do not fit.
    """
    hidden = [] if depth is None else needle.sentence
    room = length - len(hidden) - len(needle.question)
    if room < 0:
        raise ValueError(f"expected a length that holds the needle and the question, found {length}")
    kept = text[len(text) - room :]
    cut = round((depth or 0) * room)
    return np.concatenate([kept[:cut], hidden, kept[cut:], needle.question]).astype(np.int64)


@dataclass(frozen=True)
class Found:
    """What a model knows of the words of some needles.

    Attributes:
        loss: mean over needles and tokens of their words, in nats; each token is told those before it.
        words: share of words whose every token was the most probable one.
        needles: share of needles whose every word was.
    """

    loss: float
    words: float
    needles: float


def ask(model: TransformerLM, contexts: Sequence[np.ndarray], needles: Sequence[FiveWords], batch_size: int) -> Found:
    """What the model knows at the end of contexts, which it reads in spans with its state carried along.

    Args:
        model: a language model; its training mode is restored.
        contexts: of one length, each with the question at its end.
        needles: what is asked for in each.
        batch_size: contexts read at a time.
    """
    losses: list[float] = []
    words: list[list[bool]] = []
    with evaluation_mode(model), torch.inference_mode():
        for first in range(0, len(contexts), batch_size):
            asked = needles[first : first + batch_size]
            ids = torch.from_numpy(np.stack(contexts[first : first + batch_size]))
            answers = _padded([needle.answer for needle in asked])
            predicted = _predictions(model, ids, answers)
            for needle, answer, row in zip(asked, answers, predicted, strict=True):
                count = len(needle.answer)
                token_losses = -row[:count].log_softmax(-1).gather(-1, answer[:count, None])[:, 0]
                losses += token_losses.tolist()
                right = (row[:count].argmax(-1) == answer[:count]).split([len(word) for word in needle.words])
                words.append([bool(word.all()) for word in right])
    return Found(float(np.mean(losses)), float(np.mean(words)), float(np.mean([all(word) for word in words])))


def _padded(answers: list[list[int]]) -> Tensor:
    """(rows, longest) ids; what is behind the end of an answer is told to nothing before it."""
    longest = max(map(len, answers))
    return torch.tensor([answer + [0] * (longest - len(answer)) for answer in answers])


def _predictions(model: TransformerLM, ids: Tensor, answers: Tensor) -> Tensor:
    """Logits (rows, answer, vocabulary) in float32 of every token of the answers."""
    device = next(model.parameters()).device
    state = model.init_state(len(ids), device=device)
    for part in ids.split(_SPAN, dim=1):
        last, state = model.extend_hidden(part.to(device), state)
    hidden = last[:, -1:]
    if answers.shape[1] > 1:
        following, _ = model.extend_hidden(answers[:, :-1].to(device), state)
        hidden = torch.cat([hidden, following], dim=1)
    return model.logits(hidden).float().cpu()


def asked_at_depths(
    model: TransformerLM, data: PreparedData, length: int, depths: Sequence[float], trials: int
) -> dict[str, dict[str, float]]:
    """What a model knows of words hidden in the test split, by depth, and without them (`CONTROL`).

    Texts and words are the same at every depth and for every model of a tokenizer.

    Args:
        model: a language model.
        data: whose test split is read.
        length: tokens before the words that are asked for, the question included; 0 asks nothing.
        depths: 0 the beginning, 1 right before the question.
        trials: texts and needles at every depth.

    Returns:
        The fields of `Found`; empty where the length is 0.

    Raises:
        ValueError: a test split shorter than the length, and see `draw_needle` and `context`.
    """
    if not length:
        return {}
    tokens = data.split("test").tokens
    if len(tokens) < length:
        raise ValueError(f"expected at least {length} tokens of test text, found {len(tokens)}")
    generator = np.random.default_rng(_SEED)
    needles = [draw_needle(data.tokenizer.encode, generator) for _ in range(trials)]
    starts = np.linspace(0, len(tokens) - length, trials).astype(np.int64)
    texts = [tokens[start : start + length] for start in starts]
    found = {}
    for depth in (None, *depths):
        contexts = [context(text, needle, depth, length) for text, needle in zip(texts, needles, strict=True)]
        asked = ask(model, contexts, needles, _AT_ONCE)
        found[CONTROL if depth is None else f"{depth:g}"] = dataclasses.asdict(asked)
    return found
