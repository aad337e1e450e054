"""What cross-attention keeps of a source: its keys and values, for mechanisms that have no shorter form of them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KeptSource:
    """Keys and values of the source, as many as it has tokens.

    Attributes:
        key: (batch, num_kv_heads, source length, head_dim).
        value: (batch, num_kv_heads, source length, value_dim).
        key_mask: (batch, source length) bool, True for a real token; None where all are.
    """

    key: Tensor
    value: Tensor
    key_mask: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; they grow with the source."""
        return sum(x.numel() * x.element_size() for x in (self.key, self.value, self.key_mask) if x is not None)

    def reorder(self, indices: Tensor) -> "KeptSource":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named."""
        rows = (None if x is None else x.index_select(0, indices.to(x.device)) for x in self._tensors())
        return KeptSource(*rows)  # type: ignore[arg-type]

    def clone(self) -> "KeptSource":
        """The same: nothing changes a source."""
        return self

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.key, self.value, self.key_mask
