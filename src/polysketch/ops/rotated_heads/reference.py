"""The definition, in PyTorch's operations."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotated_heads(
    x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, keep_normed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Normed heads and rotated ones; arguments as `polysketch.ops.rotated_heads.rotated_heads`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x
    if scale is not None:
        factors = scale.view(x.shape[1], 1, x.shape[3]).to(wide)
        normed = (F.rms_norm(x.to(wide), x.shape[3:], eps=eps) * factors).to(x.dtype)
    rotated = None
    if cos is not None and sin is not None:
        first, second = normed.chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return (normed if scale is not None and (keep_normed or cos is None) else None), rotated
