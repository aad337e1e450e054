"""What every feature map is: a module phi from head vectors to features, for queries and for keys."""

import torch
from torch import Tensor, nn

from polysketch.ops.arguments import check_at_least_one

SHARE = ("layer", "head")


class FeatureMap(nn.Module):
    """phi: R^head_dim -> R^feature_dim; a linearised mechanism weighs (phi(q) . phi(k))^power, or by two factors.

    Args:
        head_dim: width of one head.
        num_kv_heads: key and value heads; what belongs to keys exists once for each of them where `share` is "head".
        share: "layer", one map for all heads, or "head", one for every key/value head and the query heads it serves.

    Attributes:
        power: 1, or 2 where the features are to be tensored with themselves (inside the op, never written out).
        factors: 1, or 2 where they are two halves, of which the second is to be tensored with the first.
        feature_dim: width of the features.

    Raises:
        ValueError: a size below one, or another `share`.
    """

    power: int = 1
    factors: int = 1
    feature_dim: int

    def __init__(self, head_dim: int, *, num_kv_heads: int = 1, share: str = "layer") -> None:
        super().__init__()
        check_at_least_one(head_dim=head_dim, num_kv_heads=num_kv_heads)
        if share not in SHARE:
            raise ValueError(f"share must be one of {', '.join(map(repr, SHARE))}, got {share!r}")
        self.head_dim = head_dim
        self.share = share
        self.num_maps = 1 if share == "layer" else num_kv_heads

    def map_queries(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, feature_dim)."""
        return self.map(x)

    def map_keys(self, x: Tensor) -> Tensor:
        """(batch, num_kv_heads, length, head_dim) -> (batch, num_kv_heads, length, feature_dim)."""
        return self.map(x)

    def map_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """`map_queries(query)` and `map_keys(key)`; maps that can do better at both at once, do."""
        return self.map_queries(query), self.map_keys(key)

    def weights(self, query_features: Tensor, key_features: Tensor) -> Tensor:
        """(..., queries, keys): the weights of all pairs, of features of as many heads; for few tokens."""
        pairs = zip(query_features.chunk(self.factors, -1), key_features.chunk(self.factors, -1), strict=True)
        first, *others = (query_part @ key_part.mT for query_part, key_part in pairs)
        for other in others:
            first = first * other
        return first**self.power

    def map(self, x: Tensor) -> Tensor:
        """The one map of those that treat queries and keys alike; `heads` is a multiple of the number of maps."""
        raise NotImplementedError(f"{type(self).__name__} has no map")

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw random weights anew, in place; maps without any have nothing to draw."""

    def check_input(self, x: Tensor) -> None:
        """Refuse tensors of another width, or whose heads the maps do not divide.

        Raises:
            ValueError: naming the expected and the received shape.
        """
        if x.dim() != 4 or x.shape[3] != self.head_dim or x.shape[1] % self.num_maps:
            heads = "heads" if self.num_maps == 1 else f"a multiple of {self.num_maps} heads"
            raise ValueError(f"expected (batch, {heads}, length, {self.head_dim}), got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        """The sizes every map has."""
        return f"head_dim={self.head_dim}, feature_dim={self.feature_dim}, power={self.power}, share={self.share!r}"


def check_sketch_degree(degree: int, smallest: int) -> None:
    """Refuse a degree that the recursion of a polynomial sketch does not reach.

    Raises:
        TypeError: not an integer.
        ValueError: not a power of two from `smallest` on.
    """
    check_at_least_one(degree=degree)
    if degree < smallest or degree & (degree - 1):
        raise ValueError(f"a sketch halves its degree: it must be a power of two, {smallest} or more, got {degree}")
