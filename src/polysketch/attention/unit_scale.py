"""Queries and keys of one length, and a learned scale that says how sharp their softmax is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.ops import rotated_heads
from polysketch.ops.triton.availability import AUTO_DEVICES

_EPSILON = 1e-6


class UnitScale(nn.Module):
    """Queries and keys of root mean square one, queries times exp(s), with one s for each key/value head.

    The norm has no weights, so that products of rotated queries and keys still depend on distances alone. Scales start
    at one. It computes in float32 or better: half precision has no room for squares.

    Args:
        num_kv_heads: key and value heads.
        normed: whether there is a norm; False leaves queries and keys as long as they are.
    """

    def __init__(self, num_kv_heads: int, *, normed: bool = True) -> None:
        super().__init__()
        self.normed = normed
        self.log_scale = nn.Parameter(torch.zeros(num_kv_heads))

    def forward(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(batch, num_heads, length, head_dim) and (batch, num_kv_heads, length, head_dim) -> the same, in `dtype`."""
        group = query.shape[1] // self.log_scale.shape[0]
        scale = self.log_scale.exp().repeat_interleave(group)
        if self.normed and query.device.type in AUTO_DEVICES:
            ones = torch.ones_like(scale[:1]).expand(key.shape[1])
            found = [_unit_by_program(x, factor) for x, factor in ((query, scale), (key, ones))]
            if found[0] is not None and found[1] is not None:
                return found[0].to(dtype), found[1].to(dtype)
        if self.normed:
            query, key = unit(query), unit(key)
        return (query * scale[:, None, None]).to(dtype), key.to(dtype)


def _unit_by_program(x: Tensor, scale: Tensor) -> Tensor | None:
    """`unit` times a factor for each head, in the dtype of x; None where it is no program."""
    factors = scale[:, None].expand(-1, x.shape[3]).reshape(-1)
    if not rotated_heads.programs_take(x, factors, None, None, eps=_EPSILON):
        return None
    return rotated_heads.rotated_heads(x, factors, None, None, eps=_EPSILON, backend="triton")[0]


def unit(x: Tensor) -> Tensor:
    """x with a root mean square of one along its last axis, in float32 or better."""
    return F.rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=_EPSILON)
