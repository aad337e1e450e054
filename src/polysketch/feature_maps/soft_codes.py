"""Products of two soft codes: non-negative features as sharp as their number allows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast

_SHARPNESS = 3.3
_NORM_EPSILON = 1e-6


class SoftCodes(FeatureMap):
    """phi(x) = (a(x), b(x)), where a and b share x out over r codewords each: a = sqrt(r) softmax(s (W x^ + c)).

    x^ is x divided by its length. W is the same for queries and keys. The bias c is not: it makes up for what all
    queries, or all keys, have in common. The weight of a pair is the product (a_q . a_k)(b_q . b_k) of the two
    (`factors` of 2). It is between 0 and r^2, and 1 on average where one of the two is spread evenly. So a match can
    weigh r^2 times as much as the mean key. The square of a dense sketch of r features cannot: the mean squared cosine
    of random directions is 1 / r. Nor can the square of one sharp code, which has no more than r cells.

    Args:
        head_dim: width of one head.
        codewords: r, of each of the two codes.
        num_kv_heads: key and value heads; each has codewords of its own.

    Cost: 2 head_dim r multiply-adds and 2 r exponentials a token and head; 2 (head_dim + 2) r + 2 parameters a
    key/value head.
    """

    factors = 2

    def __init__(self, head_dim: int, *, codewords: int = 24, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        check_at_least_one(codewords=codewords)
        self.codewords, self.feature_dim = codewords, 2 * codewords
        # Biases and sharpness have one axis: weight decay, which would make codes less sharp, is for matrices.
        self.query_bias = nn.Parameter(torch.zeros(self.num_maps * 2 * codewords))
        self.key_bias = nn.Parameter(torch.zeros(self.num_maps * 2 * codewords))
        # Entries near one, which `_codes` divides: a step of AdamW is small beside them, so codes keep their meaning.
        self.weight = nn.Parameter(torch.randn(self.num_maps, head_dim, 2 * codewords))
        self.log_sharpness = nn.Parameter(torch.full((self.num_maps * 2,), math.log(_SHARPNESS)))

    def map_queries(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, 2 codewords), float32 or better."""
        return self._codes(x, self.query_bias)

    def map_keys(self, x: Tensor) -> Tensor:
        """(batch, num_kv_heads, length, head_dim) -> (batch, num_kv_heads, length, 2 codewords), float32 or better."""
        return self._codes(x, self.key_bias)

    def _codes(self, x: Tensor, bias: Tensor) -> Tensor:
        """Both codes, one after the other; each adds up to sqrt(r)."""
        self.check_input(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            unit = F.rms_norm(wide, wide.shape[-1:], eps=_NORM_EPSILON).unflatten(1, (self.num_maps, -1))
            weight, bias, sharpness = (
                parameter.to(unit.dtype).view(self.num_maps, 1, -1, 2 * self.codewords)
                for parameter in (self.weight / self.head_dim**0.5, bias, self._sharpness())
            )
            logits = ((unit @ weight + bias) * sharpness).unflatten(-1, (2, -1))
            return (logits.softmax(-1) * self.codewords**0.5).flatten(-2).flatten(1, 2)

    def _sharpness(self) -> Tensor:
        """(num_maps * 2 * codewords,): that of the code to which a codeword belongs."""
        return self.log_sharpness.exp().repeat_interleave(self.codewords)
