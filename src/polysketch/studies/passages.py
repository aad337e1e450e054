"""Passages that can only be finished by remembering their beginning, and how many of their words a model knows.

A passage lists pairs of words, then lists the same pairs in another order: `remember: river copper, stone velvet, ...
recall: stone velvet, river copper, ...`. Each second word of the second list is told by the first list alone, so that
its loss says whether a model looks back, which the loss on prose hardly does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polysketch.data import TokenizerLike
from polysketch.evaluation import recall_accuracy

SPLITS = ("train", "validation", "test")
FIRST_WORDS = (  # noqa: SIM905 - a list of literals is no easier to read
    "river stone garden window bridge forest candle harbor meadow island castle market tower valley desert winter "
    "summer morning evening thunder silver ribbon letter basket"
).split()
SECOND_WORDS = (  # noqa: SIM905
    "copper velvet marble pepper cotton butter ginger cherry walnut barley hazel honey mustard almond lemon onion "
    "carrot turnip radish spinach tomato melon apple peach"
).split()

_BATCH = 20
_IGNORED = -100


def recall_passages(split: str, number: int, pairs: int) -> Iterator[str]:
    """So many passages, a pure function of the arguments; other splits have other ones."""
    generator = np.random.default_rng([SPLITS.index(split), pairs])
    for _ in range(number):
        first = generator.permutation(FIRST_WORDS)[:pairs]
        second = generator.permutation(SECOND_WORDS)[:pairs]
        order = generator.permutation(pairs)
        listed = [f"{a} {b}" for a, b in zip(first, second, strict=True)]
        yield f"remember: {', '.join(listed)}. recall: {', '.join(listed[i] for i in order)}.\n"


def passage_recall(model: Any, tokenizer: TokenizerLike, passages: Sequence[str], pairs: int) -> float:
    """The share of the second words, in the second list of each passage, that are the most probable next token.

    Args:
        model: what `evaluation.recall_accuracy` takes.
        tokenizer: gives each word of the passages one token, as one trained on them does.
        passages: of `recall_passages`.
        pairs: pairs of words in each.

    Raises:
        ValueError: a word has more than one token.
    """
    return recall_accuracy(model, _batches(tokenizer, passages, pairs))


def labelled(tokenizer: TokenizerLike, passages: Sequence[str], pairs: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of passages, (passages, length) int64; labels are -100 but where a second word is to come.

    Raises:
        ValueError: a word has more than one token.
    """
    rows = [_labelled(tokenizer, passage, pairs) for passage in passages]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


def _batches(tokenizer: TokenizerLike, passages: Sequence[str], pairs: int) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(passages), _BATCH):
        yield labelled(tokenizer, passages[first : first + _BATCH], pairs)


def _labelled(tokenizer: TokenizerLike, passage: str, pairs: int) -> tuple[list[int], list[int]]:
    start = len(tokenizer.encode(passage[: passage.index("recall:") + len("recall:")]))
    ids = tokenizer.encode(passage.removesuffix("\n"))
    if len(ids) != start + 3 * pairs:  # a first word, a second word and a comma; the last has a full stop
        raise ValueError(f"expected one token a word, found {len(ids) - start} for {pairs} pairs: {passage!r}")
    labels = [_IGNORED] * len(ids)
    for first_word in range(start, len(ids), 3):
        labels[first_word] = ids[first_word + 1]
    return ids, labels
