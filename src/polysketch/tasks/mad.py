"""Tasks of MAD, "Mechanistic Design and Scaling of Hybrid Architectures" (Poli et al. 2024)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polysketch.targets import NO_TARGET
from polysketch.tasks.base import GeneratedTask
from polysketch.tasks.batch import Row

_TRIES = 100


@dataclass(frozen=True, kw_only=True)
class InContextRecall(GeneratedTask):
    """Keys and values in turn through the whole row; where a key comes again, its value is asked for.

    A key has one value in a row, and another in other rows. Keys are the lower half of the ids, values the upper half.
    With `noise_share`, pairs of noise tokens stand in the place of some of the pairs ("noisy in-context recall"; ids of
    noise come after all others). With motifs longer than 1, keys and values are 1 to so many tokens, and every token of
    a value is asked for ("fuzzy in-context recall").

    Two departures from MAD: it trains on every next token, and here the answers alone are trained on; its held-out rows
    of fuzzy recall have keys of the longest kind alone.

    Attributes:
        length: tokens of a row.
        vocabulary: ids of keys and values.
        noise_vocabulary, noise_share: ids of noise, and its share of the pairs.
        key_motif, value_motif: tokens of a key and of a value, at most.
    """

    name = "in-context-recall"
    asks = "next"
    learned = ("vocabulary", "noise_vocabulary")
    length: int = 128
    vocabulary: int = 16
    noise_vocabulary: int = 0
    noise_share: float = 0.0
    key_motif: int = 1
    value_motif: int = 1

    @property
    def vocab_size(self) -> int:
        """Keys, values, noise, and one id that stands where no whole pair fits."""
        return self.vocabulary + self.noise_vocabulary + 1

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        self._check()
        for _ in range(_TRIES):
            row = self._filled(generator)
            if np.any(row.answer != NO_TARGET):
                return row
        return self._filled(generator, alike=(0, int(generator.integers(1, self.length // self._longest_pair))))

    def _filled(self, generator: np.random.Generator, alike: tuple[int, ...] = ()) -> Row:
        """A row; the pairs of the numbers `alike` have one key, and are no noise."""
        ids, answer = np.full(self.length, self.vocab_size - 1), np.full(self.length, NO_TARGET)
        values: dict[tuple[int, ...], np.ndarray] = {}
        first = np.empty(0, int)
        end = number = 0
        while end + self._longest_pair <= self.length:
            if generator.random() < self.noise_share and number not in alike:
                pair = self.vocabulary + generator.integers(0, self.noise_vocabulary, 2)
            else:
                key = first if number in alike[1:] else self._motif(generator, 0, self.key_motif)
                first = key if number in alike[:1] else first
                value = values.get(tuple(key.tolist()))
                start = end + len(key) - 1
                if value is None:
                    value = values[tuple(key.tolist())] = self._motif(generator, self._half, self.value_motif)
                else:
                    answer[start : start + len(value)] = value
                pair = np.concatenate([key, value])
            ids[end : end + len(pair)] = pair
            end, number = end + len(pair), number + 1
        return Row(ids, answer)

    @property
    def _longest_pair(self) -> int:
        return self.key_motif + self.value_motif

    @property
    def _half(self) -> int:
        return self.vocabulary // 2

    def _motif(self, generator: np.random.Generator, first: int, longest: int) -> np.ndarray:
        """Different tokens of one half of the ids; each size is as likely as any other."""
        size = int(generator.integers(1, longest + 1))
        return first + generator.choice(self._half, size, replace=False)

    def _check(self) -> None:
        fits = min(self.key_motif, self.value_motif) >= 1 and max(self.key_motif, self.value_motif) <= self._half
        if not fits or self.length < 2 * self._longest_pair:
            raise ValueError(
                f"expected motifs of 1 to {self._half} tokens, half of the vocabulary, and room for two pairs, found "
                f"{self.key_motif} and {self.value_motif} in a length of {self.length}"
            )
        if not 0.0 <= self.noise_share <= 0.9 or (self.noise_share > 0) != (self.noise_vocabulary > 0):
            raise ValueError(
                f"expected a share of noise from 0 to 0.9, and ids for it where there is some, found "
                f"{self.noise_share} and {self.noise_vocabulary}"
            )


@dataclass(frozen=True, kw_only=True)
class Memorization(GeneratedTask):
    """Keys whose values are the same in every row, and in none of them: the model has to keep them in its weights.

    A row is keys and gaps in turn; the answer at a gap is the value of the key before it.

    Attributes:
        length: tokens of a row.
        vocabulary: ids; the last one is the gap, half of the others are keys, half values.
    """

    name = "memorization"
    asks = "next"
    learned = ("seed",)
    length: int = 32
    vocabulary: int = 256

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        if self.length < 2 or self.length % 2 or self.vocabulary < 5:
            raise ValueError(
                f"expected an even length from 2 on and a vocabulary from 5 on, found {self.length} and "
                f"{self.vocabulary}"
            )
        keys = generator.integers(0, len(self._values), self.length // 2)
        ids, answer = np.full(self.length, self.vocabulary - 1), np.full(self.length, NO_TARGET)
        ids[::2], answer[1::2] = keys, self._values[keys]
        return Row(ids, answer)

    @cached_property
    def _values(self) -> np.ndarray:
        """The value of each key, drawn from the seed alone."""
        keys = (self.vocabulary - 1) // 2
        return keys + np.random.default_rng([self.seed, 0x6D6164]).permutation(keys)


@dataclass(frozen=True, kw_only=True)
class Compression(GeneratedTask):
    """Random tokens and then one that says "compress": all of them are to be read out of the vector of the last one.

    What reads them is no attention: it sees that vector and a place in the row (`models.SequenceAutoencoder`). One
    departure from MAD: the last token, which is always the same, is not asked for.

    Attributes:
        length: tokens of a row.
        vocabulary: ids; the last one says "compress".
    """

    name = "compression"
    asks = "recovered"
    length: int = 32
    vocabulary: int = 16

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        if self.length < 2 or self.vocabulary < 3:
            raise ValueError(
                f"expected a length from 2 on and a vocabulary from 3 on, found {self.length} and {self.vocabulary}"
            )
        ids = np.full(self.length, self.vocabulary - 1)
        ids[:-1] = generator.integers(0, self.vocabulary - 1, self.length - 1)
        return Row(ids, np.where(np.arange(self.length) < self.length - 1, ids, NO_TARGET))
