"""From which length on something is faster than what it is compared with."""

import itertools
import math
from collections.abc import Mapping


def break_even(speeds: Mapping[int, float]) -> float | None:
    """The length from which on it is faster, between two that were measured; None where it is not, or not yet.

    Args:
        speeds: length -> times as fast as the other.
    """
    lengths = sorted(speeds)
    if not lengths or speeds[lengths[-1]] < 1:
        return None
    for shorter, longer in reversed(list(itertools.pairwise(lengths))):
        if speeds[shorter] < 1:
            share = math.log(1 / speeds[shorter]) / math.log(speeds[longer] / speeds[shorter])
            return shorter * (longer / shorter) ** share
    return float(lengths[0])
