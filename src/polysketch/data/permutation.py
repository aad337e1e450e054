"""A keyed permutation of 0 .. size-1 that is computed, not stored: any position in constant time and memory.

NumPy's stored permutation of 10^8 windows takes 0.8 GB in every process, and seconds at the start of a run, whenever
it is resumed, and in every epoch. This one gives the positions of a batch in less than a millisecond, however many
windows there are.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Four rounds make a pseudo-random permutation from ideal round functions (Luby and Rackoff 1988); ours are not ideal.
ROUNDS = 6
# Below this many bits a half the network has too few distinct permutations.
FEWEST_HALF_BITS = 3
# Fewer integers than the smallest network permutes would be sent through it up to that many times.
FEWEST_WALKED = 4**FEWEST_HALF_BITS


class KeyedPermutation:
    """A pseudo-random permutation of the integers below ``size``.

    A Feistel network permutes the smallest power of four that is large enough; positions that leave the range are sent
    through again until they come back ("cycle walking"), fewer than four times on average.

    Attributes:
        size: Number of integers.
    """

    def __init__(self, size: int, key: int) -> None:
        """Prepare the round keys.

        Args:
            size: Number of integers, from 1 to 2^62.
            key: Any integer; another key gives another permutation.

        Raises:
            ValueError: The size lies outside its range.
        """
        if not 1 <= size <= 2**62:
            raise ValueError(f"expected a size of 1 to 2^62, found {size}")
        self.size = size
        self._half = np.uint64(max(FEWEST_HALF_BITS, ((size - 1).bit_length() + 1) // 2))
        self._round_keys = _round_keys(key)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where the positions go.

        Args:
            positions: Integers in [0, size), any shape.

        Returns:
            Integers in [0, size), int64, same shape; distinct for distinct positions.

        Raises:
            ValueError: A position lies outside the range.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.size):
            raise ValueError(f"expected positions in [0, {self.size}), found {positions.min()} to {positions.max()}")
        images = self._network(positions.reshape(-1).astype(np.uint64))
        while (outside := images >= self.size).any():
            images[outside] = self._network(images[outside])
        return images.astype(np.int64).reshape(positions.shape)

    def _network(self, values: np.ndarray) -> np.ndarray:
        return _network(values, self._half, self._round_keys)


class KeyedPermutations:
    """Many pseudo-random permutations, each of a size of its own, evaluated together.

    Each is the network of `KeyedPermutation`; one of at most 64 integers is the order of as many random numbers, for
    the network would be walked too often.

    Attributes:
        sizes: Number of integers of each permutation, (permutations,) int64; 0 for one that is never asked.
    """

    def __init__(self, sizes: np.ndarray, key: int) -> None:
        """Prepare the round keys.

        Args:
            sizes: As the attribute.
            key: Any integer; another key gives other permutations.
        """
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._round_keys = _round_keys(key)

    def __call__(self, which: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the positions go.

        Args:
            which: (n,) the permutation of each position.
            positions: (n,) integers from 0 to below the size of their permutation.

        Returns:
            (n,) int64, likewise; distinct for distinct positions of one permutation.
        """
        sizes = self.sizes[which]
        keys = _mix(self._round_keys[:, None] + _mix(which.astype(np.uint64)))
        images = np.asarray(positions, dtype=np.int64).copy()
        short = sizes <= FEWEST_WALKED
        images[short] = _ranks(sizes[short], images[short], keys[0, short])
        images[~short] = _walk(sizes[~short], images[~short], keys[:, ~short])
        return images


def _ranks(sizes: np.ndarray, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The rank of each position's random number among those of all positions below the size."""
    others = np.arange(FEWEST_WALKED)
    numbers = _mix(keys[:, None] + others.astype(np.uint64))  # distinct, for no two numbers have the same image
    own = np.take_along_axis(numbers, positions[:, None], axis=1)
    return ((numbers < own) & (others < sizes[:, None])).sum(axis=1)


def _walk(sizes: np.ndarray, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The positions sent through their networks until they lie below the size, which is more than 64."""
    bits = np.frexp((sizes - 1).astype(np.float64))[1]
    halves = ((bits + 1) // 2).astype(np.uint64)
    images = _network(positions.astype(np.uint64), halves, keys)
    while (outside := images >= sizes.astype(np.uint64)).any():
        images[outside] = _network(images[outside], halves[outside], keys[:, outside])
    return images.astype(np.int64)


def _round_keys(key: int) -> np.ndarray:
    digest = hashlib.blake2b(str(key).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _network(values: np.ndarray, half: np.ndarray | np.uint64, round_keys: np.ndarray) -> np.ndarray:
    """Values of 2 half bits, permuted; half and the keys are the same for all values, or one for each."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(words: np.ndarray) -> np.ndarray:
    """Scatter the bits of 64-bit words (the finaliser of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
