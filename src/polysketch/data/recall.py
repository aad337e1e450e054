"""Multi-query associative recall: pairs of keys and values first, then keys whose values are asked for.

The task of "Zoology" (Arora et al. 2023): it separates mechanisms that can look up what they have seen from those that
cannot, at small sizes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from polysketch.targets import NO_TARGET

# The power law of the distances between queries: slot i has weight a i^(a-1).
POWER = 0.01


def recall_batch(
    batch_size: int,
    *,
    length: int,
    num_pairs: int,
    vocab_size: int,
    seed: int,
    index: int,
    minimum_gap: int = 0,
    filler: Literal["zero", "random"] = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of sequences, a pure function of all arguments.

    With K pairs and vocabulary V, a row begins k1 v1 k2 v2 ... (2 K positions), keys distinct in [1, V/2), values
    distinct in [V/2, V). The rest is (length - 2 K)/2 slots of two positions; K of them are drawn without replacement
    with weights a i^(a-1), a = 0.01, i = 1, 2, ... the number of the slot. Query j, the key kj, stands at the first
    position of the j-th slot drawn, and its label vj at the same position of the labels: the model is to answer there.

    Args:
        batch_size: Rows.
        length: Positions of a row.
        num_pairs: K.
        vocab_size: V.
        seed: Seed of the stream of batches.
        index: Number of the batch in the stream, at least 0.
        minimum_gap: Only slots at least this many positions after every pair are drawn from, with the same weights, so
            that the answer lies beyond a local chunk of that size.
        filler: What stands where nothing was put: token 0, or random tokens of [0, V).

    Returns:
        Ids and labels, int64 of shape (batch_size, length); labels are -100 where nothing is asked.

    Raises:
        ValueError: The pairs do not fit the vocabulary, or the queries do not fit the length and the gap.
    """
    if minimum_gap < 0:
        raise ValueError(f"minimum_gap must be at least 0, got {minimum_gap}")
    first_slot = minimum_gap // 2
    num_slots = (length - 2 * num_pairs) // 2
    _check(num_pairs, vocab_size, num_slots - first_slot, minimum_gap, length)
    if filler not in FILLERS:
        raise ValueError(f"expected a filler of {', '.join(FILLERS)}, found {filler!r}")
    generator = np.random.default_rng([seed, index])
    middle = vocab_size // 2
    keys = 1 + _draw(generator, batch_size, np.zeros(middle - 1), num_pairs)
    values = middle + _draw(generator, batch_size, np.zeros(vocab_size - middle), num_pairs)
    log_weights = (POWER - 1) * np.log(np.arange(first_slot, num_slots) + 1)
    slots = first_slot + _draw(generator, batch_size, log_weights, num_pairs)

    ids = FILLERS[filler](generator, (batch_size, length), vocab_size)
    labels = np.full((batch_size, length), NO_TARGET, dtype=np.int64)
    ids[:, 0 : 2 * num_pairs : 2] = keys
    ids[:, 1 : 2 * num_pairs : 2] = values
    queries = 2 * num_pairs + 2 * slots
    np.put_along_axis(ids, queries, keys, axis=1)
    np.put_along_axis(labels, queries, values, axis=1)
    return torch.from_numpy(ids), torch.from_numpy(labels)


def _zeros(generator: np.random.Generator, shape: tuple[int, int], vocab_size: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int64)


def _random(generator: np.random.Generator, shape: tuple[int, int], vocab_size: int) -> np.ndarray:
    return generator.integers(0, vocab_size, shape, dtype=np.int64)


FILLERS = {"zero": _zeros, "random": _random}


def _draw(generator: np.random.Generator, rows: int, log_weights: np.ndarray, count: int) -> np.ndarray:
    """In each row, ``count`` distinct indices drawn one after another with weights exp(log_weights), (rows, count).

    The largest of log-weight plus Gumbel noise are such a draw, in its order.
    """
    noisy = log_weights + generator.gumbel(size=(rows, len(log_weights)))
    return np.argsort(-noisy, axis=1, kind="stable")[:, :count]


def _check(num_pairs: int, vocab_size: int, num_free_slots: int, minimum_gap: int, length: int) -> None:
    if num_pairs < 1 or num_pairs > vocab_size // 2 - 1:
        raise ValueError(
            f"expected 1 to {vocab_size // 2 - 1} pairs for a vocabulary of {vocab_size} (keys are distinct in its "
            f"lower half, without 0), found {num_pairs}"
        )
    if num_free_slots < num_pairs:
        raise ValueError(
            f"expected a slot for each of the {num_pairs} queries, found {max(0, num_free_slots)} in a length of "
            f"{length} at least {minimum_gap} positions after the pairs: choose a longer length, fewer pairs or "
            "a smaller gap"
        )
