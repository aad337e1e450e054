"""Which tokens could be read off the text before them, and how far back: where a far field is worth something."""

from enum import IntEnum

import numpy as np


class Repeat(IntEnum):
    """What the pair of a token and the one before it has been, so far in its window."""

    NEW = 0
    NEAR = 1
    FAR = 2


def repeats(windows: np.ndarray, reach: int) -> np.ndarray:
    """Whether each predicted token ends a pair that has occurred, and whether within the last `reach` tokens.

    Attention that has learned induction predicts the second half of such a pair from its last occurrence.

    Args:
        windows: (rows, length + 1) token ids.
        reach: tokens that count as near.

    Returns:
        (rows, length) of `Repeat`, for the predictions of tokens 1 to length.
    """
    found = np.full((len(windows), windows.shape[1] - 1), Repeat.NEW, dtype=np.int8)
    for row, tokens in zip(found, windows.tolist(), strict=True):
        last: dict[tuple[int, int], int] = {}
        for place in range(1, len(tokens)):
            pair = (tokens[place - 1], tokens[place])
            if pair in last:
                row[place - 1] = Repeat.NEAR if place - last[pair] <= reach else Repeat.FAR
            last[pair] = place
    return found
