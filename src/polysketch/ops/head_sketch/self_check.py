"""A small norm and sketch by the programs and by the definition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check

_ROWS = 300  # no multiple of a block, and more than one

Sketch = Callable[..., tuple[Tensor, Tensor | None]]


def programs_agree(sketch: Sketch, x: Tensor, scale: Tensor, matrices: Tensor | None, eps: float) -> bool:
    """Whether the programs may be taken for heads and matrices with these sizes; see `ops.triton.self_check`.

    Args:
        sketch: `head_sketch`.
        x, scale, matrices, eps: of the call.
    """
    features = 0 if matrices is None else matrices.shape[-1]
    call = {"inputs": x.shape[-1], "features": features, "weights": str(scale.dtype).removeprefix("torch.")}
    return self_check.passed("head_sketch", x, call, partial(_errors, sketch, x, scale.dtype, features, eps))


def _errors(
    sketch: Sketch, like: Tensor, weights: torch.dtype, features: int, eps: float, backward: bool
) -> dict[str, float]:
    width = like.shape[-1]
    drawn = self_check.random_inputs(
        x=(1, 1, _ROWS, width), scale=(width,), bias=(width,), matrices=(1, 2, width, features)
    )
    matrices = (drawn.pop("matrices") / width**0.5).to(like.dtype)  # a product keeps the size of what it is made of

    def both(backend: str, **given: Tensor) -> Tensor:
        """Normed heads and features, side by side."""
        x, scale, bias = given["x"], given["scale"], given["bias"]
        own: Any = matrices.to(x.device, x.dtype) if features else None
        if backend == "triton":
            scale, bias = scale.to(weights), bias.to(weights)
        normed, sketched = sketch(x, scale, bias, own, eps=eps, backend=backend)
        return normed if sketched is None else torch.cat([normed, sketched], -1)

    programs, definition = (partial(both, backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, drawn, like, backward=backward)
