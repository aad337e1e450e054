"""The definition, in PyTorch's operations."""

import torch.nn.functional as F
from torch import Tensor


def head_sketch(
    x: Tensor, scale: Tensor, bias: Tensor, matrices: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Normed heads and (normed G1) * (normed G2); arguments as `polysketch.ops.head_sketch.head_sketch`."""
    normed = F.layer_norm(x.to(scale.dtype), x.shape[-1:], scale, bias, eps).to(x.dtype)
    if matrices is None:
        return normed, None
    grouped = normed.unflatten(1, (matrices.shape[0], -1))
    left, right = (grouped @ matrix[:, None] for matrix in matrices.unbind(1))
    return normed, (left * right).flatten(1, 2)
