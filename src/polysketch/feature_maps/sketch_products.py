"""Products of two learned sketches of unit length: signed features, for sums that correct themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.arguments import check_at_least_one

_NORM_EPSILON = 1e-6


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
        """(batch, heads, length, head_dim) -> (batch, heads, length, 2 sketch_size), float32 or better."""
        self.check_input(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            unit = F.rms_norm(wide, wide.shape[-1:], eps=_NORM_EPSILON).unflatten(1, (self.num_maps, -1))
            sketches = unit @ (self.weight.to(unit.dtype) / self.head_dim**0.5)[:, None]
            return F.normalize(sketches.unflatten(-1, (2, -1)), dim=-1).flatten(-2).flatten(1, 2)
