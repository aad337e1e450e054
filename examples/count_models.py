"""Count models of bytes: what a text gives away through the last 1, 2 or 3 bytes alone. The yardstick of the demo."""

import numpy as np


class CountModel:
    """P(byte | the `order` bytes before it), from counts of a training text, backing off to shorter contexts.

    p_k(b | c) = (count(c b) + p_{k-1}(b | c shortened)) / (count(c) + 1), p_{-1} uniform: interpolation with one
    pseudo-count, so that no byte is impossible.

    Args:
        text: the training text.
        order: bytes of context, 0 to 6.
    """

    def __init__(self, text: bytes, order: int) -> None:
        self.order = order
        self.tables = [_count(_codes(text, length)) for length in range(order + 2)]

    def bits_per_byte(self, text: bytes) -> float:
        """Mean of -log2 p over all bytes of a text but the first `order`."""
        size = len(text) - self.order
        probability = np.full(size, 1 / 256)
        for order in range(self.order + 1):
            skip = self.order - order
            together = _look_up(self.tables[order + 1], _codes(text, order + 1)[skip:][:size])
            context = _look_up(self.tables[order], _codes(text, order)[skip:][:size])
            probability = (together + probability) / (context + 1)
        return float(-np.log2(probability).mean())


def _codes(text: bytes, length: int) -> np.ndarray:
    """One number for each run of `length` bytes, in order of their starts; zeros for the empty run."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    count = len(values) - length + 1 if length else len(values)
    codes = np.zeros(count, dtype=np.int64)
    for place in range(length):
        codes = codes * 256 + values[place : place + count]
    return codes


def _count(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(codes, return_counts=True)


def _look_up(table: tuple[np.ndarray, np.ndarray], codes: np.ndarray) -> np.ndarray:
    known, counts = table
    place = np.searchsorted(known, codes).clip(max=len(known) - 1)
    return np.where(known[place] == codes, counts[place], 0)
