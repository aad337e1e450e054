"""A small convolution by the programs and by the definition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.triton import self_check

_LENGTH = 300  # no multiple of a block, and more than one

Convolve = Callable[..., tuple[Tensor, Tensor]]


def programs_agree(convolve: Convolve, x: Tensor, weight: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> bool:
    """Whether the programs may be taken for filters and channels of these sizes; see `ops.triton.self_check`.

    Args:
        convolve: `causal_convolution`.
        x, weight, key_mask, tail: of the call.
    """
    call = {
        "width": x.shape[3],
        "size": weight.shape[2],
        "tail": "none" if tail is None else str(tail.dtype).removeprefix("torch."),
        "masked": key_mask is not None,
    }
    tail_dtype = None if tail is None else tail.dtype
    attempt = partial(_errors, convolve, x, weight.shape[2], tail_dtype, key_mask is not None)
    return self_check.passed("causal_convolution", x, call, attempt)


def _errors(
    convolve: Convolve, like: Tensor, size: int, tail_dtype: torch.dtype | None, is_masked: bool, backward: bool
) -> dict[str, float]:
    width = like.shape[3]
    drawn = self_check.random_inputs(x=(1, 1, _LENGTH, width), weight=(1, width, size), tail=(1, 1, size - 1, width))
    if tail_dtype is None:
        drawn.pop("tail")
    key_mask = torch.arange(_LENGTH, device=like.device)[None] % 7 != 3 if is_masked else None

    def output(backend: str, x: Tensor, weight: Tensor, tail: Tensor | None = None) -> Tensor:
        if tail is not None and backend == "triton":
            tail = tail.to(tail_dtype)
        options: dict[str, Any] = {"key_mask": key_mask, "tail": tail, "backend": backend}
        return convolve(x, weight, **options)[0]

    programs, definition = (partial(output, backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, drawn, like, backward=backward)
