"""Which lengths a series still reaches: what would take too long is left out, and named."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

_QUADRATIC = 2.0


@dataclass
class Growth:
    """What series have taken so far, and so what they would take at another length.

    Args:
        limit: seconds of a call at most; None for no limit.
    """

    limit: float | None
    _points: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)

    def note(self, series: Hashable, length: int, seconds: float) -> None:
        """Remember what a call of a series took at a length; infinitely long where it failed."""
        self._points.setdefault(series, []).append((length, seconds))

    def allows(self, series: Hashable, length: int) -> bool:
        """Whether a call of that length is expected to fit; the first one of a series always is."""
        known = self._points.get(series, [])
        points = [(at, seconds) for at, seconds in known if at <= length or math.isfinite(seconds)]
        return self.limit is None or not points or self._expected(sorted(points), length) <= self.limit

    @staticmethod
    def _expected(points: list[tuple[int, float]], length: int) -> float:
        """Seconds, growing from the longest on as they last grew: linearly at least, at most as the square."""
        (last, taken), power = points[-1], _QUADRATIC
        if len(points) > 1 and points[-2][0] < last:
            before, faster = points[-2]
            power = min(_QUADRATIC, max(1.0, math.log(taken / faster) / math.log(last / before)))
        return taken * (length / last) ** power
