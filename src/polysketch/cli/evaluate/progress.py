"""How much of an evaluation is done."""

from collections.abc import Callable

from polysketch.progress import Progress

__all__ = ["share_done"]


def share_done(unit: str) -> Callable[[int, int], None]:
    """What shows a person (done, total) as a share, a rate and the time left.

    Args:
        unit: of what is counted, in the plural.
    """
    progress = Progress("evaluating", unit=unit)

    def tell(done: int, total: int) -> None:
        progress.total = total
        progress.update(done)
        if done >= total:
            progress.close()

    return tell
