"""Sketches of several powers of q . k side by side: sums of powers for wide heads."""

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.draws import draw_normal_
from polysketch.ops.arguments import check_at_least_one


class PowerSketches(FeatureMap):
    """phi(x) = [1, x, S_2(x), ..., S_D(x)],  S_i(x) = sqrt(1/r) (G_1^T x) * ... * (G_i^T x), * entrywise.

        E phi(q) . phi(k) = 1 + q . k + ... + (q . k)^degree,    weights the square of that (`power` 2)

    G_1, ..., G_D are Gaussian matrices of unit variance with r columns. The products of the features of `slices[i]` are
    an unbiased estimate of (q . k)^i, exact up to the first power. Its relative error falls like sqrt(3^i / r) for
    vectors that are alike, so it is for low powers. The powers share their matrices: their errors go together, and a
    token costs one projection of degree r columns. The square is never negative, and biased up by the variance.

    This is `SymmetricPowers` for heads whose packed products are too many (Reizin 2024, section 4.3; the thesis leaves
    sketches of its polynomials for later).

    The matrices are a buffer: fixed, saved with the model, drawn from PyTorch's default generator.

    Args:
        head_dim: width of one head.
        degree: D, the highest power, at least 1.
        sketch_size: r, the features of each power from the second on.
        num_kv_heads: key and value heads.
        share: "layer", one sketch for all heads, or "head", one for every key/value head.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below one.

    Cost: degree head_dim r multiply-adds a token and head; in the op, with m = 1 + head_dim + (degree - 1) r features,
    2 m^2 (value_dim + 1) operations and a state of m^2 / 2 (value_dim + 1) numbers for each key/value head.
    """

    power = 2
    matrices: Tensor

    def __init__(
        self, head_dim: int, *, degree: int = 3, sketch_size: int = 32, num_kv_heads: int = 1, share: str = "layer"
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_at_least_one(degree=degree, sketch_size=sketch_size)
        self.degree, self.sketch_size = degree, sketch_size
        sizes = [1, head_dim, *[sketch_size] * (degree - 1)]
        self.slices = tuple(slice(sum(sizes[:power]), sum(sizes[: power + 1])) for power in range(degree + 1))
        self.feature_dim = sum(sizes)
        if degree > 1:  # up to the first power nothing is drawn
            self.register_buffer("matrices", torch.empty(self.num_maps, head_dim, degree * sketch_size))
        self.resample()

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw all matrices anew: from `generator`, on its device, or from the default one."""
        if self.degree > 1:
            draw_normal_(self.matrices, generator)

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, feature_dim), lowest power first."""
        self.check_input(x)
        return torch.cat([torch.ones_like(x[..., :1]), x, *(self._sketched(x) if self.degree > 1 else [])], -1)

    def _sketched(self, x: Tensor) -> list[Tensor]:
        """S_2(x), ..., S_D(x)."""
        projected = x.unflatten(1, (self.num_maps, -1)) @ self.matrices.to(x.dtype)[:, None]
        product, *factors = projected.flatten(1, 2).split(self.sketch_size, dim=-1)
        product = product * self.sketch_size**-0.5
        found = []
        for factor in factors:
            product = product * factor
            found.append(product)
        return found
