"""The random polynomial sketch (PolySketchFormer, Algorithm 1)."""

import torch
from torch import Tensor

from polysketch.feature_maps.draws import draw_normal_
from polysketch.feature_maps.random_sketch import RandomSketch


class GaussianSketch(RandomSketch):
    """Features whose squared products estimate <q, k>^degree, never negative.

        S(A, 1) = A,    S(A, p) = sqrt(1/r) (S(A, p/2) G1) * (S'(A, p/2) G2),    phi(x) = S(x, degree / 2)

    with S and S' independent, G Gaussian of unit variance with r columns, * entrywise. phi(q) . phi(k) is an unbiased
    estimate of <q, k>^(degree / 2) with an error that falls like 1 / sqrt(r); its square is biased up by the variance.
    At degree 2 phi is x itself and the weight exact. Published code divides by r where the paper has sqrt(r): its
    weights are r^2 too small; here the paper holds.

    The matrices are buffers: fixed, saved with the model, drawn from PyTorch's default generator or from a seed.
    Arguments and errors are those of `RandomSketch`.

    Cost: (degree / 2) head_dim r + (degree / 2 - 2) r^2 multiply-adds a token and head.
    """

    def allocate(self, level: int, nodes: int, width: int) -> None:
        """One matrix for every node."""
        sketch_size = self.feature_dim
        self.register_buffer(f"matrices_{level}", torch.empty(self.num_maps, nodes, width, sketch_size))

    def draw(self, generator: torch.Generator | None) -> None:
        """Fill all matrices."""
        for level in range(self.num_levels):
            draw_normal_(self.matrices(level), generator)

    def matrices(self, level: int) -> Tensor:
        """(num_maps, nodes, inputs, sketch_size), leaves of the recursion at level 0."""
        return getattr(self, f"matrices_{level}")

    def product_matrices(self, dtype: torch.dtype) -> Tensor | None:
        """As `RandomSketch.product_matrices`: at degree 4."""
        return self._scaled(0, dtype) if self.num_levels == 1 else None

    def project(self, values: list[Tensor], level: int) -> list[Tensor]:
        """Each node's value times its matrix, the leaves' in one product."""
        matrices = self._scaled(level, values[0].dtype)
        if len(values) == 1:
            joined = values[0] @ _for_heads(matrices.transpose(1, 2).flatten(2))
            return list(joined.chunk(matrices.shape[1], dim=-1))
        return [value @ _for_heads(matrices[:, node]) for node, value in enumerate(values)]

    def _scaled(self, level: int, dtype: torch.dtype) -> Tensor:
        return self.matrices(level).to(dtype) * self.feature_dim**-0.25  # of two such factors: sqrt(1/r)


def _for_heads(matrix: Tensor) -> Tensor:
    """(maps, inputs, outputs), shaped to multiply (batch, maps, heads, length, inputs)."""
    return matrix[0] if matrix.shape[0] == 1 else matrix[:, None]
