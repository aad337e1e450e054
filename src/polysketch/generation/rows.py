"""What becomes of the rows of a batch while tokens come."""

from collections.abc import Callable, Collection

from torch import Tensor

__all__ = ["Rows", "ids_of"]


def ids_of(stop: int | Collection[int] | Tensor | None) -> frozenset[int]:
    """The token ids that end a text, of one, several or none."""
    if isinstance(stop, Tensor):
        stop = stop.flatten().tolist()
    return frozenset(() if stop is None else (stop,) if isinstance(stop, int) else stop)


class Rows:
    """The tokens of every row so far, and which rows have ended."""

    def __init__(
        self,
        num_rows: int,
        stop: int | Collection[int] | None,
        on_token: Callable[[int, int], bool | None] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.stopped = [False] * num_rows
        self._stop = ids_of(stop)
        self._on_token = on_token

    def add(self, chosen: list[int]) -> None:
        """Append one token to every row that has not ended; a row that has ended goes on in the batch, unheard."""
        for row, token in enumerate(chosen):
            self.stopped[row] = self.stopped[row] or token in self._stop
            if self.stopped[row]:
                continue
            self.tokens[row].append(token)
            if self._on_token is not None:
                self.stopped[row] = self._on_token(row, token) is True

    @property
    def all_stopped(self) -> bool:
        """Whether no row takes another token."""
        return all(self.stopped)

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row) for row in self.tokens)
