"""phi(x) = x: with power 2 the exact degree-2 kernel."""

from torch import Tensor

from polysketch.feature_maps.base import FeatureMap


class Identity(FeatureMap):
    """phi(x) = x, squared by the op: weights (q . k)^2 exactly.

    Args:
        head_dim: width of one head, and of the features.
        num_kv_heads: accepted so that every map is built alike.
    """

    power = 2

    def __init__(self, head_dim: int, *, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        self.feature_dim = head_dim

    def map(self, x: Tensor) -> Tensor:
        """The input itself."""
        self.check_input(x)
        return x
