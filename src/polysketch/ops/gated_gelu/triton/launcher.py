"""The middle of a gated linear unit as programs in Triton (`programs`).

Design, for N numbers of the result of s bytes:

    pass         bytes    a program
    forward      3 s N    a tile of rows and of the columns of both halves
    backward     5 s N    a tile of rows and of the columns of both halves

Bytes decide: there are a few operations a number. Nothing is kept for backward but the projection, of which gelu and
its slope are made again.
"""

from typing import Any

from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch

_MOST_ROWS = 2**30


def why_not(joined: Tensor) -> str | None:
    """Why the programs cannot take a call with a tensor like this; None where they can."""
    reason = triton.why_not(joined)
    if reason is not None:
        return reason
    if joined.shape[:-1].numel() >= _MOST_ROWS:
        return f"the triton backend takes fewer than 2^30 rows, got {tuple(joined.shape)}"
    return None


def output_of(joined: Tensor) -> Tensor:
    """Room for the result, contiguous."""
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


def gradient_of(joined: Tensor) -> Tensor:
    """Room for the gradient of both halves, contiguous."""
    return joined.new_empty(joined.shape)


def forward(joined: Tensor) -> Tensor:
    """gelu(gate) * up."""
    from polysketch.ops.gated_gelu.triton.programs.forward import gated_gelu

    output = output_of(joined)
    rows = _rows(joined)
    _launch("gated_gelu", gated_gelu, output, rows, output, rows.stride(0))
    return output


def backward(gradient: Tensor, joined: Tensor) -> Tensor:
    """The gradient of `joined`, from that of the result."""
    from polysketch.ops.gated_gelu.triton.programs.backward import gated_gelu_backward

    found = gradient_of(joined)
    rows = _rows(joined)
    _launch("gated_gelu_backward", gated_gelu_backward, gradient, rows, gradient.contiguous(), found, rows.stride(0))
    return found


def _launch(program: str, kernel: Any, output: Tensor, *arguments: Tensor | int) -> None:
    """Over the rows and columns of the result."""
    width = output.shape[-1]
    block = covering_block(width)
    use = configuration(program, output.device, width=block, bytes=output.element_size())
    use["BLOCK"] = min(use["BLOCK"], block)
    rows = output.shape[:-1].numel()
    programs = num_blocks(rows, use["TOKENS"]) * num_blocks(width, use["BLOCK"])
    launch(kernel, programs, *arguments, rows, configuration=use, WIDTH=width)


def _rows(joined: Tensor) -> Tensor:
    """(rows, 2 * inner), the numbers of a row side by side."""
    rows = joined.reshape(joined.shape[:-1].numel(), joined.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
