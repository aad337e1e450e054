"""What programs of HyperAttention are given, whoever computes."""

from typing import NamedTuple

from torch import Tensor

from polysketch.ops.hyper.meetings import Meetings


class Given(NamedTuple):
    """What a call is given.

    Attributes:
        query: (batch, heads, n, head_dim).
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        real: (batch, m) bool, False for keys that nobody sees; None when all are seen. Of blocks alone.
        met: what queries see besides; has none of the keys that are not real.
        block: tokens of the blocks inside which attention is causal; 0 for none.
        scale: factor on q . k.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    real: Tensor | None
    met: Meetings
    block: int
    scale: float

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Query, key and value, by name."""
        return {"query": self.query, "key": self.key, "value": self.value}
