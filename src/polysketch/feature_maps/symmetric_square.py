"""Packed products of all pairs of entries: with power 2 the exact degree-4 kernel."""

from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.packing import pack_square, packed_size

MAX_FEATURES = 2100


class SymmetricSquare(FeatureMap):
    """phi(x) = packed x (x) x, squared by the op: phi(q) . phi(k) = (q . k)^2, weights (q . k)^4 exactly.

    For small heads: with m = head_dim (head_dim + 1) / 2 features, a state holds m^2 / 2 sums for each value entry.

    Args:
        head_dim: width of one head; up to 64, which makes 2,080 features.
        num_kv_heads: accepted so that every map is built alike.

    Raises:
        ValueError: a head so wide that there would be more than 2,100 features.

    Cost: m multiply-adds a token and head for the features; in the op 2 m^2 (value_dim + 1) operations. A state takes
    2 m^2 (value_dim + 1) bytes a key/value head in float32: 0.6 MB at head_dim 16, 18 MB at 32, 563 MB at 64.
    """

    power = 2

    def __init__(self, head_dim: int, *, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        self.feature_dim = packed_size(head_dim)
        if self.feature_dim > MAX_FEATURES:
            raise ValueError(
                f"head_dim {head_dim} makes {self.feature_dim} packed features, expected at most {MAX_FEATURES} "
                "(head_dim 64): the exact degree 4 is for small heads, wider ones need a sketch"
            )

    def map(self, x: Tensor) -> Tensor:
        """The squares of the entries, then sqrt(2) times the product of every pair."""
        self.check_input(x)
        return pack_square(x)
