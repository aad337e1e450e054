"""The random polynomial sketch (PolySketchFormer, Algorithm 1)."""

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap, check_at_least_one, check_sketch_degree


class GaussianSketch(FeatureMap):
    """Features whose squared products estimate <q, k>^degree, never negative.

        S(A, 1) = A,    S(A, p) = sqrt(1/r) (S(A, p/2) G1) * (S'(A, p/2) G2),    phi(x) = S(x, degree / 2)

    with S and S' independent, G Gaussian of unit variance with r columns, * entrywise. phi(q) . phi(k) is an unbiased
    estimate of <q, k>^(degree / 2) with an error that falls like 1 / sqrt(r); its square is biased up by the variance.
    At degree 2 phi is x itself and the weight exact. Published code divides by r where the paper has sqrt(r): its
    weights are r^2 too small; here the paper holds.

    The matrices are buffers: fixed, saved with the model, drawn from PyTorch's default generator.

    Args:
        head_dim: width of one head.
        degree: 2, 4, 8, 16, ...; degree - 2 matrices.
        sketch_size: r, the number of features (head_dim at degree 2).
        num_kv_heads: key and value heads.
        share: "layer", one sketch for all heads, or "head", one for every key/value head.

    Raises:
        ValueError: a degree that is no power of two, or a size below one.

    Cost: (degree / 2) head_dim r + (degree / 2 - 2) r^2 multiply-adds a token and head.
    """

    power = 2

    def __init__(
        self,
        head_dim: int,
        *,
        degree: int = 4,
        sketch_size: int = 32,
        num_kv_heads: int = 1,
        share: str = "layer",
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_sketch_degree(degree, smallest=2)
        check_at_least_one(sketch_size=sketch_size)
        self.degree = degree
        self.feature_dim = head_dim if degree == 2 else sketch_size
        self.num_levels = 0
        nodes, width = degree // 2, head_dim
        while nodes > 1:
            matrices = torch.empty(self.num_maps, nodes, width, sketch_size)
            self.register_buffer(f"matrices_{self.num_levels}", matrices)
            self.num_levels += 1
            nodes, width = nodes // 2, sketch_size
        self.resample()

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw all matrices anew: from `generator`, on its device, or from the default one."""
        for level in range(self.num_levels):
            matrices = self.matrices(level)
            if generator is None:
                matrices.normal_()
                continue
            matrices.copy_(torch.randn(matrices.shape, generator=generator, device=generator.device))

    def matrices(self, level: int) -> Tensor:
        """(num_maps, nodes, inputs, sketch_size), leaves of the recursion at level 0."""
        return getattr(self, f"matrices_{level}")

    def map(self, x: Tensor) -> Tensor:
        """phi of queries or of keys, which share it."""
        self.check_input(x)
        grouped = x.unflatten(1, (self.num_maps, -1))
        values = [grouped]
        for level in range(self.num_levels):
            projected = self._project(values, self.matrices(level).to(x.dtype))
            values = [left * right for left, right in zip(projected[::2], projected[1::2], strict=True)]
        return values[0].flatten(1, 2)

    def _project(self, values: list[Tensor], matrices: Tensor) -> list[Tensor]:
        """Each node's value times its matrix; the leaves have one value in common."""
        matrices = matrices * self.feature_dim**-0.25  # of two such factors: sqrt(1/r)
        if len(values) == 1:
            joined = values[0] @ _for_heads(matrices.transpose(1, 2).flatten(2))
            return list(joined.chunk(matrices.shape[1], dim=-1))
        return [value @ _for_heads(matrices[:, node]) for node, value in enumerate(values)]


def _for_heads(matrix: Tensor) -> Tensor:
    """(maps, inputs, outputs), shaped to multiply (batch, maps, heads, length, inputs)."""
    return matrix[0] if matrix.shape[0] == 1 else matrix[:, None]
