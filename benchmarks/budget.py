"""A run of bounded length: sections get shares of what is left, and what does not fit is left out by name."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    """Seconds for a run, or for a section of it.

    Args:
        seconds: from now on.
    """

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """The end, on the monotonic clock."""
        return self.started + self.seconds

    @property
    def left(self) -> float:
        """Seconds until the end; negative beyond it."""
        return self.deadline - time.monotonic()

    def section(self, share: float) -> "Budget":
        """A part that may take `share` of what is left now."""
        return Budget(max(0.0, self.left) * share)

    def fits(self, estimated_seconds: float) -> bool:
        """Whether something of that length ends in time."""
        return estimated_seconds <= self.left
