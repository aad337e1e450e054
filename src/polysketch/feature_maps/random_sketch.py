"""What random polynomial sketches share: the recursion over degrees, and drawing anew."""

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap, check_sketch_degree
from polysketch.feature_maps.draws import begin_draw, seed_or_default
from polysketch.ops.arguments import check_at_least_one


class RandomSketch(FeatureMap):
    """S(A, 1) = A,  S(A, p) = sqrt(1/r) (S(A, p/2) G1) * (S'(A, p/2) G2),  phi(x) = S(x, degree / 2), * entrywise.

    A subclass says what the random projections G are: `allocate` makes the buffers of one level of the recursion,
    `draw` fills them, `project` multiplies with them. phi is x itself at degree 2.

    Args:
        head_dim: width of one head.
        degree: 2, 4, 8, 16, ...; degree - 2 projections.
        sketch_size: r, the number of features (head_dim at degree 2).
        num_kv_heads: key and value heads.
        share: "layer", one sketch for all heads, or "head", one for every key/value head.
        seed: of the first draw and all after it. The seed of the next draw is a buffer then, saved with the rest, so
            that a reloaded sketch is drawn anew alike. None takes each draw from PyTorch's default generator.

    Attributes:
        num_levels: of the recursion; 0 at degree 2.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a degree that is no power of two, a size below one, or a seed below 0.
    """

    power = 2
    next_seed: Tensor | None

    def __init__(
        self,
        head_dim: int,
        *,
        degree: int = 4,
        sketch_size: int = 32,
        num_kv_heads: int = 1,
        share: str = "layer",
        seed: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_sketch_degree(degree, smallest=2)
        check_at_least_one(sketch_size=sketch_size)
        self.degree = degree
        self.feature_dim = head_dim if degree == 2 else sketch_size
        self.num_levels = 0
        nodes, width = degree // 2, head_dim
        while nodes > 1:
            self.allocate(self.num_levels, nodes, width)
            self.num_levels += 1
            nodes, width = nodes // 2, sketch_size
        first = None if seed is None else torch.tensor(seed_or_default(seed), device="cpu")
        self.register_buffer("next_seed", first)
        self.resample()

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw all projections anew: from `generator`, on its device, or the next draw of the sketch's own seed.

        Without either, from PyTorch's default generator. A decoding state of before has sums of other features.
        """
        if generator is None and self.next_seed is not None:
            generator = begin_draw(int(self.next_seed), self.next_seed)
        self.draw(generator)

    def allocate(self, level: int, nodes: int, width: int) -> None:
        """Register the buffers of the projections, width -> sketch_size, of `nodes` nodes; leaves are level 0."""
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def draw(self, generator: torch.Generator | None) -> None:
        """Fill the buffers of all levels: from `generator`, or from PyTorch's default one."""
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def project(self, values: list[Tensor], level: int) -> list[Tensor]:
        """Each node's value, (batch, num_maps, heads, length, width), times its projection.

        `values` has one for each node, or at the leaves a single one that they have in common.
        """
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def product_matrices(self, dtype: torch.dtype) -> Tensor | None:
        """(num_maps, 2, head_dim, sketch_size) where phi(x) = (x G1) * (x G2), scaled; None for other recursions."""
        return None

    def map(self, x: Tensor) -> Tensor:
        """phi of queries or of keys, which share it."""
        self.check_input(x)
        # On a CPU PyTorch's products in half precision may take ten times as long as in float32.
        wide = x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x
        values = [wide.unflatten(1, (self.num_maps, -1))]
        for level in range(self.num_levels):
            projected = self.project(values, level)
            values = [left * right for left, right in zip(projected[::2], projected[1::2], strict=True)]
        return values[0].flatten(1, 2).to(x.dtype)
