"""The norm of queries and keys and their rotary positions, one after the other."""

from torch import Tensor

from polysketch.nn.query_key_norm import QueryKeyNorm
from polysketch.nn.rope import Rotation, apply_rotation
from polysketch.ops.rotated_heads import programs_take, rotated_heads


def norm_and_rotate(
    x: Tensor, norm: QueryKeyNorm | None, rotation: Rotation | None, *, keep_unrotated: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Heads normed and then rotated: on a CUDA device by one program (`ops.rotated_heads`).

    Args:
        x: (batch, heads, length, head_dim).
        norm: None for none.
        rotation: of the positions of x; None for none.
        keep_unrotated: give them before the rotation too.

    Returns:
        Heads before the rotation, None unless they are kept, and after it; of the shape and dtype of x.
    """
    scale = None if norm is None else norm.scale
    cos, sin = (None, None) if rotation is None else rotation
    eps = QueryKeyNorm.eps
    if programs_take(x, scale, cos, sin, eps=eps, keep_normed=keep_unrotated):
        normed, rotated = rotated_heads(x, scale, cos, sin, eps=eps, keep_normed=keep_unrotated, backend="triton")
    else:
        normed = None if norm is None else norm(x)
        rotated = None if rotation is None else apply_rotation(x if normed is None else normed, rotation)
    unrotated = x if norm is None else normed
    found = unrotated if rotated is None else rotated
    assert found is not None  # a norm alone gives normed heads, whether they are kept or not
    return (unrotated if keep_unrotated else None), found
