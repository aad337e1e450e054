"""Which tokens could be read off the text before them, and how far back: where a far field is worth something."""

from enum import IntEnum
from itertools import pairwise

import numpy as np


class Repeat(IntEnum):
    """What the pair of a token and the one before it has been, so far in its window."""

    NEW = 0
    NEAR = 1
    FAR = 2


def distances(windows: np.ndarray) -> np.ndarray:
    """How many tokens ago the pair of each predicted token and the one before it occurred last; 0 where it is new.

    Args:
        windows: (rows, length + 1) token ids.

    Returns:
        (rows, length) int64, for the predictions of tokens 1 to length.
    """
    found = np.zeros((len(windows), windows.shape[1] - 1), dtype=np.int64)
    for row, tokens in zip(found, windows.tolist(), strict=True):
        last: dict[tuple[int, int], int] = {}
        for place, pair in enumerate(pairwise(tokens)):
            row[place] = place - last.get(pair, place)
            last[pair] = place
    return found


def repeats(windows: np.ndarray, reach: int) -> np.ndarray:
    """Whether each predicted token ends a pair that has occurred, and whether within the last `reach` tokens.

    Attention that has learned induction predicts the second half of such a pair from its last occurrence.

    Args:
        windows: (rows, length + 1) token ids.
        reach: tokens that count as near.

    Returns:
        (rows, length) of `Repeat`, for the predictions of tokens 1 to length.
    """
    ago = distances(windows)
    return np.select([ago == 0, ago <= reach], [Repeat.NEW, Repeat.NEAR], Repeat.FAR).astype(np.int8)
