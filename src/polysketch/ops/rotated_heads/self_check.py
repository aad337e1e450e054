"""A small norm and rotation by the programs and by the definition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check

_HEADS = 5  # more than a program's, and no multiple of them
_TOKENS = 150  # no multiple of a block, and more than one

Rotate = Callable[..., tuple[Tensor | None, Tensor | None]]


def programs_agree(
    rotate: Rotate, x: Tensor, scale: Tensor | None, cos: Tensor | None, eps: float, keep_normed: bool
) -> bool:
    """Whether the programs may be taken for heads and options like these; see `ops.triton.self_check`.

    Args:
        rotate: `rotated_heads`.
        x, scale, cos, eps, keep_normed: of the call.
    """
    weights = None if scale is None else scale.dtype
    named = str(weights).removeprefix("torch.")
    call = {"inputs": x.shape[-1], "weights": named, "rotates": cos is not None, "keeps": keep_normed}
    attempt = partial(_errors, rotate, x, weights, cos is not None, {"eps": eps, "keep_normed": keep_normed})
    return self_check.passed("rotated_heads", x, call, attempt)


def _errors(
    rotate: Rotate, like: Tensor, weights: torch.dtype | None, rotates: bool, options: dict[str, Any], backward: bool
) -> dict[str, float]:
    width = like.shape[-1]
    normed = {} if weights is None else {"scale": (_HEADS * width,)}
    drawn = self_check.random_inputs(x=(1, _HEADS, _TOKENS, width), angles=(_TOKENS, width // 2), **normed)
    angles = drawn.pop("angles").to(like.device)
    turn = (angles.cos().float(), angles.sin().float()) if rotates else (None, None)

    def both(backend: str, **given: Tensor) -> Tensor:
        """What is made of heads, side by side."""
        scale = given.get("scale")
        if scale is not None and backend == "triton":
            scale = scale.to(weights)
        made = rotate(given["x"], scale, *turn, **options, backend=backend)
        return torch.cat([one for one in made if one is not None], -1)

    programs, definition = (partial(both, backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, drawn, like, backward=backward)
