"""The random polynomial sketch of sampled Hadamard transforms (PolySketchFormer, arXiv v1, definitions 2.3 and 2.4)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from polysketch.feature_maps.draws import draw_below_
from polysketch.feature_maps.random_sketch import RandomSketch
from polysketch.ops import hadamard_transform


class SRHTSketch(RandomSketch):
    """`GaussianSketch` with every Gaussian matrix replaced by random signs, a Hadamard transform, sampled columns.

        TensorSRHT(A, B) = r^(-1/2) (A D1 Had P1) * (B D2 Had P2),    S(A, p) = TensorSRHT(S(A, p/2), S'(A, p/2))

    with D a diagonal of random signs, Had the unscaled Walsh-Hadamard matrix, P sampling r columns with replacement,
    all independent of one another; phi(x) = S(x, degree / 2). Widths that are no power of two are padded with zeros.
    phi(q) . phi(k) is an unbiased estimate of <q, k>^(degree / 2) with an error that falls like 1 / sqrt(r), at
    degree 4 a smaller one than of Gaussian matrices; its square is biased up by the variance. The paper's first version
    also samples the leaves once more by r^(-1/2) D Had P; here, as in Algorithm 1, they are the vectors themselves.

    Signs and columns are buffers: fixed, saved with the model, drawn from PyTorch's default generator or from a seed.
    Arguments and errors are those of `RandomSketch`.

    Cost: (degree / 2) h log2(h) + (degree / 2 - 2) r log2(r) additions a token and head, h and r padded.
    """

    def allocate(self, level: int, nodes: int, width: int) -> None:
        """Signs of the padded width and sampled columns for every node."""
        padded = 1 << (width - 1).bit_length()
        self.register_buffer(f"signs_{level}", torch.empty(self.num_maps, nodes, padded))
        columns = torch.empty(self.num_maps, nodes, self.feature_dim, dtype=torch.int64)
        self.register_buffer(f"columns_{level}", columns)

    def draw(self, generator: torch.Generator | None) -> None:
        """Fill all signs and columns."""
        for level in range(self.num_levels):
            signs = self.signs(level)
            draw_below_(signs, 2, generator)
            signs.mul_(2).sub_(1)
            draw_below_(self.columns(level), signs.shape[-1], generator)

    def signs(self, level: int) -> Tensor:
        """(num_maps, nodes, padded inputs) of 1 and -1, leaves of the recursion at level 0."""
        return getattr(self, f"signs_{level}")

    def columns(self, level: int) -> Tensor:
        """(num_maps, nodes, sketch_size) int64, the columns of the Hadamard matrix that are kept."""
        return getattr(self, f"columns_{level}")

    def project(self, values: list[Tensor], level: int) -> list[Tensor]:
        """Each node's value padded, signed, transformed and sampled."""
        # Rounded to half precision, the factor would be off by one fraction in all features, eight times in a weight.
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        signs = self.signs(level).to(dtype) * self.feature_dim**-0.25  # of two such factors: sqrt(1/r)
        columns, nodes = self.columns(level), signs.shape[1]
        missing = signs.shape[-1] - values[0].shape[-1]
        values = [pad(value, (0, missing)) for value in values] * (nodes // len(values))
        return [
            _sample(hadamard_transform(value * signs[:, node, None, None]), columns[:, node]).to(value.dtype)
            for node, value in enumerate(values)
        ]


def _sample(values: Tensor, columns: Tensor) -> Tensor:
    """(batch, maps, heads, length, width) at (maps, r) columns: (batch, maps, heads, length, r)."""
    if columns.shape[0] == 1:
        return values[..., columns[0]]
    return values.gather(-1, columns[:, None, None].expand(*values.shape[:-1], -1))
