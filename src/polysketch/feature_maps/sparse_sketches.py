"""Two learned sketches of unit length of which only the largest entries are kept: addresses of a large memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import ops
from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.arguments import check_at_least_one

_NORM_EPSILON = 1e-6
_LARGEST_SIZE = 256  # a cell's number is kept beside weights, and half precision has whole numbers up to here


class SparseSketches(FeatureMap):
    """phi(x) = (a(x), b(x)) with a = t(A x^) / |t(A x^)| and b likewise with B, of `sketch_size` numbers.

    x^ is x with a root mean square of one. t keeps the `kept` entries of largest size, less the size of the next one:
    t(y)_i = sign(y_i) max(0, |y_i| - |y|_(kept + 1)). So an entry comes and goes at zero, and phi is continuous. A and
    B are learned, the same for queries and keys. The weight of a pair is the product (a_q . a_k)(b_q . b_k)
    (`factors` of 2); it is 1 for equal vectors, and 0 for most pairs of unrelated ones. The vectors are addresses for
    `ops.delta_memory`: `sketch_size`^2 cells, of which a token touches `kept`^2.

    The sketches' product is Algorithm 1 of PolySketchFormer at degree 2, with learned sketches. That two short lists of
    the largest entries address a large memory is from Lample et al., "Large Memory Layers with Product Keys" (2019).

    Args:
        head_dim: width of one head.
        sketch_size: numbers of each sketch, at most 256.
        kept: of them that are not zero; less than `sketch_size`.
        num_kv_heads: key and value heads; each has sketches of its own.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size out of range.

    Cost: 2 head_dim sketch_size multiply-adds and the search for the largest entries, a token and head; 2 head_dim
    sketch_size parameters a key/value head.
    """

    factors = 2

    def __init__(self, head_dim: int, *, sketch_size: int = 64, kept: int = 8, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        check_at_least_one(sketch_size=sketch_size, kept=kept)
        if sketch_size > _LARGEST_SIZE:
            raise ValueError(f"sketch_size must be at most {_LARGEST_SIZE}, got {sketch_size}")
        if kept >= sketch_size:
            raise ValueError(f"kept must be less than sketch_size, got {kept} and {sketch_size}")
        self.sketch_size, self.kept, self.feature_dim = sketch_size, kept, 2 * sketch_size
        # Entries near one, which `sparse` divides: a step of AdamW is small beside them.
        self.weight = nn.Parameter(torch.randn(self.num_maps, head_dim, 2 * sketch_size))

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, 2 sketch_size), zeros among them."""
        cells, weights = (part.unflatten(-1, (2, -1)) for part in self.sparse(x))
        return weights.new_zeros(*weights.shape[:-1], self.sketch_size).scatter(-1, cells.long(), weights).flatten(-2)

    def sparse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, heads, length, head_dim) -> cells and weights (batch, heads, length, 2 kept) for `delta_memory`.

        Cells are int32, those of the first sketch in front; weights are float32 or better.
        """
        self.check_input(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            unit = F.rms_norm(wide, wide.shape[-1:], eps=_NORM_EPSILON).unflatten(1, (self.num_maps, -1))
            sketches = unit @ (self.weight.to(unit.dtype) / self.head_dim**0.5)[:, None]
            return _largest(sketches.flatten(1, 2).unflatten(-1, (2, -1)), self.kept)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{super().extra_repr()}, kept={self.kept}"


def _largest(sketches: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """(..., 2, size) -> cells and weights (..., 2 kept)."""
    cells = ops.largest_entries(sketches, kept + 1)
    found = sketches.gather(-1, cells.long())
    above = found[..., :-1].sign() * (found[..., :-1].abs() - found[..., -1:].abs())
    return cells[..., :-1].flatten(-2), F.normalize(above, dim=-1).flatten(-2)
