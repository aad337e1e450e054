"""A run of a study that was stopped stops the study."""

from typing import Protocol


class Ended(Protocol):
    """How training or a conversion ended; see `TrainingResult`."""

    @property
    def stopped_by(self) -> str:
        """`finished`, `time` or `signal`."""

    @property
    def signal_number(self) -> int | None:
        """The signal, or None."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and saved; the same call goes on.

    Attributes:
        signal_number: the signal that asked, or None; the command ends with its status.
    """

    def __init__(self, signal_number: int | None) -> None:
        super().__init__()
        self.signal_number = signal_number


def require_finished(result: Ended) -> None:
    """Go on with what is finished alone.

    Raises:
        Stopped: it was stopped before.
    """
    if result.stopped_by != "finished":
        raise Stopped(result.signal_number)
