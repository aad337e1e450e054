"""Feature maps that act on every entry alone: elu + 1, relu, squared relu."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 from zero on, exp(x) below.

    Not by adding one to elu(x), which rounds to zero below -17 in float32 and leaves a row without any mass.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return (x.float() if x.dtype == torch.float16 else x).relu().square()


ELEMENTWISE_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_plus_one,
    "relu": torch.relu,
    "squared-relu": squared_relu,
}


class Elementwise(FeatureMap):
    """phi(x) = f(x) entry by entry; weights phi(q) . phi(k), never negative.

    f = elu + 1 is that of Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs" (ICML 2020), equation 7; it
    is positive, so that every token has weight. With the two others a query may have weight zero on every key.

    Args:
        head_dim: width of one head, and of the features.
        kind: "elu" (elu + 1), "relu" or "squared-relu", whose squares of float16 are float32.
        num_kv_heads: accepted so that every map is built alike.

    Raises:
        ValueError: an unknown kind; the message lists those that exist.

    Cost: a few operations an entry.
    """

    power = 1

    def __init__(
        self, head_dim: int, *, kind: Literal["elu", "relu", "squared-relu"] = "elu", num_kv_heads: int = 1
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        if kind not in ELEMENTWISE_KINDS:
            raise ValueError(f"unknown kind {kind!r}; known kinds: {', '.join(ELEMENTWISE_KINDS)}")
        self.kind = kind
        self.feature_dim = head_dim

    def map(self, x: Tensor) -> Tensor:
        """f(x), in the dtype of x but for squares of float16."""
        self.check_input(x)
        return ELEMENTWISE_KINDS[self.kind](x)

    def extra_repr(self) -> str:
        """Sizes and kind."""
        return f"{super().extra_repr()}, kind={self.kind!r}"
