"""The requests of a step, those together that move on together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Requests that take a step together: equally many new tokens each, one request after the other.

    Attributes:
        first: the place of their first token among the tokens of the step.
        length: new tokens of each.
        pages: where the state of each is kept.
        position: (requests,) int64 in host memory, tokens that each has seen.
    """

    first: int
    length: int
    pages: list[int]
    position: Tensor

    @property
    def tokens(self) -> slice:
        """Their places among the tokens of the step."""
        return slice(self.first, self.first + self.length * len(self.pages))

    def of(self, tensor: Tensor) -> Tensor:
        """What is theirs of (tokens of the step, ...): (requests, length, ...)."""
        return tensor[self.tokens].unflatten(0, (len(self.pages), self.length))

    @property
    def is_fresh(self) -> bool:
        """Whether they have seen no token; the page then holds what another request left."""
        return not bool(self.position.any())


def rows_of(starts: list[int], ends: list[int], pages: list[int]) -> list[Rows]:
    """Requests by themselves, but those with a single new token, not their first, together.

    Args:
        starts: the place of each request's first new token among those of the step, and the end of the last.
        ends: tokens that each has seen after the step.
        pages: of each; may be longer.
    """
    rows: list[Rows] = []
    for request, (first, last) in enumerate(pairwise(starts)):
        length = last - first
        if length == 0:  # stands for nothing, in a step that is filled up to a size
            continue
        position = torch.tensor([ends[request] - length], device="cpu")
        one = Rows(first, length, [pages[request]], position)
        if rows and _is_step(one) and _is_step(rows[-1]):
            before = rows.pop()
            one = Rows(before.first, 1, before.pages + one.pages, torch.cat([before.position, position]))
        rows.append(one)
    return rows


def _is_step(rows: Rows) -> bool:
    return rows.length == 1 and bool((rows.position > 0).all())
