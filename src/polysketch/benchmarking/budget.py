"""Which lengths a series still reaches: what would take too long is left out, and named."""

import math
from dataclasses import dataclass, field

_QUADRATIC = 2.0


@dataclass
class Budget:
    """Seconds that one call may take, and what the series have taken so far.

    Args:
        seconds: of a call at most; None for no limit.
    """

    seconds: float | None
    _points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def note(self, name: str, length: int, seconds: float) -> None:
        """Remember what a call of the series `name` took at a length."""
        self._points.setdefault(name, []).append((length, seconds))

    def allows(self, name: str, length: int) -> bool:
        """Whether a call of that length is expected to fit; the first one of a series always is."""
        points = self._points.get(name)
        return self.seconds is None or not points or self._expected(sorted(points), length) <= self.seconds

    @staticmethod
    def _expected(points: list[tuple[int, float]], length: int) -> float:
        """Seconds, growing from the longest on as they last grew: linearly at least, at most as the square."""
        (last, taken), power = points[-1], _QUADRATIC
        if len(points) > 1 and points[-2][0] < last:
            before, faster = points[-2]
            power = min(_QUADRATIC, max(1.0, math.log(taken / faster) / math.log(last / before)))
        return taken * (length / last) ** power
