"""A run of bounded length: sections get shares of what is left, and what does not fit is left out by name."""

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Seconds for a whole run.

    Args:
        seconds: from now on.
    """

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the end; negative beyond it."""
        return self.started + self.seconds - time.monotonic()

    def section(self, share: float) -> "Section":
        """A part that may take `share` of what is left now."""
        return Section(time.monotonic() + max(0.0, self.left) * share)


@dataclass
class Section:
    """A part of a run.

    Attributes:
        deadline: on the monotonic clock.
    """

    deadline: float

    def fits(self, estimated_seconds: float) -> bool:
        """Whether something of that length ends in time."""
        return time.monotonic() + estimated_seconds <= self.deadline
