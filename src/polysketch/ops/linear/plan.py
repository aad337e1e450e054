"""What one call of the chunked backend is made of."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class Diagonal(IntEnum):
    """Which weights inside a chunk count."""

    NONE = 0
    CAUSAL = 1
    FULL = 2


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor."""

    power: int
    causal: bool
    offset: float
    normalize: bool
    degree: int
    chunk: int
    diagonal: Diagonal
    return_sums: bool


class Inputs(NamedTuple):
    """Aligned tensors of one call; `length` (batch,) is each row's, None where all rows are full."""

    query: Tensor
    key: Tensor
    value: Tensor
    local_query: Tensor | None
    local_key: Tensor | None
    log_decay: Tensor | None
    sums: Tensor | None
    normalizer: Tensor | None
    length: Tensor | None


class Outputs(NamedTuple):
    """output (batch, heads, L, h), denominator (batch, heads, L), sums and normalizer of the folded tokens."""

    output: Tensor
    denominator: Tensor
    sums: Tensor
    normalizer: Tensor


class Span(NamedTuple):
    """Tokens `start`..`stop` of an aligned sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def within(self, outer: "Span") -> slice:
        """Where these tokens stand among those of `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)
