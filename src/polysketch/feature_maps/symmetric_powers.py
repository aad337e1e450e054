"""Packed products of up to `degree` entries: features whose products are sums of powers of q . k."""

import math
from collections import Counter
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.arguments import check_at_least_one

MAX_FEATURES = 2100


class SymmetricPowers(FeatureMap):
    """phi(x) = [1, x, packed x (x) x, packed x (x) x (x) x, ...] up to `degree` factors; exact.

        phi(q) . phi(k) = 1 + q . k + ... + (q . k)^degree,    weights the square of that (`power` 2)

    Each unordered product of r entries is there once, times the root of the number of its orders, r! / (m_1! m_2! ...):
    without that factor the products would be those of another kernel. The r-th power takes the features of
    `slices[r]`, so that a sum of powers with coefficients is a matter of multiplying the features of one side.

    For small heads: there are C(head_dim + degree, degree) features.

    Args:
        head_dim: width of one head.
        degree: the highest power, at least 1.
        num_kv_heads: accepted so that every map is built alike.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below one, or more than 2,100 features.

    Cost: one multiply-add for each feature, token and head; in the op, with m features, 2 m^2 (value_dim + 1)
    operations and a state of m^2 / 2 (value_dim + 1) numbers for each key/value head.
    """

    power = 2
    orders: Tensor

    def __init__(self, head_dim: int, *, degree: int = 2, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        check_at_least_one(degree=degree)
        self.degree = degree
        self.feature_dim = _number_of_products(head_dim, degree)
        sizes = [math.comb(head_dim + power - 1, power) for power in range(degree + 1)]
        self.slices = tuple(slice(sum(sizes[:power]), sum(sizes[: power + 1])) for power in range(degree + 1))
        # Integers, for a cast of the module to half precision leaves those alone. Sizes determine them: not saved.
        self.register_buffer("orders", torch.tensor(_orders(head_dim, degree)), persistent=False)

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, feature_dim), lowest power first."""
        self.check_input(x)
        products = [torch.ones_like(x[..., :1]), x]
        for power in range(2, self.degree + 1):
            products.append(torch.cat(self._times_smaller(x, products[-1], power), -1))
        return torch.cat(products, -1) * self.orders.to(x.dtype).sqrt()

    def _times_smaller(self, x: Tensor, products: Tensor, power: int) -> list[Tensor]:
        """Every entry times the products of power - 1 entries none of which comes before it.

        In lexicographic order those of entries from i on are the last ones: C(head_dim - i + power - 2, power - 1).
        """
        kept = (math.comb(self.head_dim - entry + power - 2, power - 1) for entry in range(self.head_dim))
        return [x[..., entry : entry + 1] * products[..., -count:] for entry, count in enumerate(kept)]


def _number_of_products(width: int, degree: int) -> int:
    """C(width + degree, degree), or a refusal; of large sizes it is not computed, for that takes for ever."""
    number = math.comb(width + degree, degree) if max(width, degree) < MAX_FEATURES else None
    if number is None or number > MAX_FEATURES:
        raise ValueError(
            f"head_dim {width} makes {number or 'too many'} packed products of up to {degree} entries, expected at "
            f"most {MAX_FEATURES}: exact powers in linear time are for small heads and low degrees"
        )
    return number


def _orders(width: int, degree: int) -> list[int]:
    """How many orders each product has: for every power, and in it for every choice of entries, lexicographically."""
    return [
        math.factorial(power) // math.prod(map(math.factorial, Counter(entries).values()))
        for power in range(degree + 1)
        for entries in combinations_with_replacement(range(width), power)
    ]
