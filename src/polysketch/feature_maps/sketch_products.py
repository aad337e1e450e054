"""Products of two learned sketches of unit length: signed features, for sums that correct themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops import rotated_heads
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast
from polysketch.ops.triton.availability import AUTO_DEVICES

_NORM_EPSILON = 1e-6
_LEAST_SQUARE = 1e-12


class SketchProducts(FeatureMap):
    """phi(x) = (a(x), b(x)) with a = A x^ / |A x^| and b = B x^ / |B x^|, of r numbers each.

    x^ is x with a root mean square of one. A and B are learned, the same for queries and keys. The weight of a pair is
    the product (a_q . a_k)(b_q . b_k) of two cosines (`factors` of 2). It is between -1 and 1, 1 for equal vectors, and
    of size 1 / r or somewhat more for unrelated ones. That is Algorithm 1 of PolySketchFormer at degree 2 with two
    changes: the sketches' products are all kept, r^2 of them, and the sketches are learned. Weights are signed: they
    need no denominator under the delta rule (`ops.delta_writes`), and have no meaning as shares.

    Args:
        head_dim: width of one head.
        sketch_size: r, of each sketch.
        num_kv_heads: key and value heads; each has sketches of its own.

    Cost: 2 head_dim r multiply-adds a token and head; 2 head_dim r parameters a key/value head.
    """

    factors = 2

    def __init__(self, head_dim: int, *, sketch_size: int = 32, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        check_at_least_one(sketch_size=sketch_size)
        self.sketch_size, self.feature_dim = sketch_size, 2 * sketch_size
        # Entries near one, which `map` divides: a step of AdamW is small beside them.
        self.weight = nn.Parameter(torch.randn(self.num_maps, head_dim, 2 * sketch_size))

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, 2 sketch_size).

        In float32 or better; of bfloat16, where one program gives sketches their length, in that. float16 has no room
        for products of long vectors.
        """
        self.check_input(x)
        with without_autocast(x.device.type):
            if x.dtype == torch.bfloat16 and x.device.type in AUTO_DEVICES:
                found = _unit_halves_by_program(self._sketches(x))
                if found is not None:
                    return found
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            sketches = self._sketches(F.rms_norm(wide, wide.shape[-1:], eps=_NORM_EPSILON))
            return F.normalize(sketches.unflatten(-1, (2, -1)), dim=-1).flatten(-2)

    def _sketches(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(x.dtype, torch.float32)) / self.head_dim**0.5
        return (x.unflatten(1, (self.num_maps, -1)) @ weight.to(x.dtype)[:, None]).flatten(1, 2)


def _unit_halves_by_program(sketches: Tensor) -> Tensor | None:
    """Both halves of unit length, so that no norm before is needed; None where no program runs."""
    heads, size = sketches.shape[1], sketches.shape[3] // 2
    halves = sketches.unflatten(-1, (2, size)).flatten(2, 3)
    factors = sketches.new_full((heads * size,), size**-0.5, dtype=torch.float32)
    if not rotated_heads.programs_take(halves, factors, None, None, eps=_LEAST_SQUARE):
        return None
    units, _ = rotated_heads.rotated_heads(halves, factors, None, None, eps=_LEAST_SQUARE, backend="triton")
    assert units is not None  # there are factors
    return units.view_as(sketches)
