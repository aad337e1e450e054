"""Norm and rotation of heads as programs in Triton (`programs`).

Design, for T tokens, H heads of d numbers of s bytes, of which G share what is read of angles:

    pass         bytes                                        a program
    forward      s T H d (1 + each result) and 4 T d H / G    a tile of tokens, G heads
    backward     s T H d (2 + each gradient) and 4 T d H / G  a tile of tokens, G heads

Bytes decide: there are a few operations a number. Angles of neighbouring programs are the same and come out of the
cache. Nothing is kept for backward but x, of which the norm is made again; without a norm not even that. Gradients of
scale are summed over a tile by its program and then over tiles, without atomic additions: the same call gives the same
bits.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch

WIDEST = 256
"""Numbers of a head: its halves are in registers as a whole."""


def why_not(x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    reason = triton.why_not(x)
    if reason is not None:
        return reason
    if scale is None and cos is None:
        return "the triton backend takes a scale, angles or both, got neither"
    if x.shape[3] % 2 or not 0 < x.shape[3] <= WIDEST:
        return f"the triton backend takes heads of an even number of up to {WIDEST} numbers, got {tuple(x.shape)}"
    if x.shape[0] * x.shape[2] * x.shape[1] >= 2**31:
        return f"the triton backend takes fewer than 2^31 heads of tokens, got {tuple(x.shape)}"
    if scale is not None and not (scale.is_floating_point() and scale.shape == (x.shape[1] * x.shape[3],)):
        return f"the triton backend takes a factor for each number of {tuple(x.shape)}'s heads, got {_said(scale)}"
    if (cos is None) != (sin is None) or not all(_fits(x, angles) for angles in (cos, sin)):
        return f"the triton backend takes float32 angles of the tokens of {tuple(x.shape)}, got {_said(cos, sin)}"
    return None


def _fits(x: Tensor, angles: Tensor | None) -> bool:
    if angles is None:
        return True
    shape = (x.shape[2], x.shape[3] // 2)
    return angles.dtype == torch.float32 and angles.shape in (shape, (1, 1, *shape), (x.shape[0], 1, *shape))


def _said(*tensors: Tensor | None) -> str:
    """For a reason."""
    return " and ".join("none" if one is None else f"{tuple(one.shape)} of {one.dtype}" for one in tensors)


def gives_normed(scale: Tensor | None, cos: Tensor | None, keep_normed: bool) -> bool:
    """Whether normed heads are a result."""
    return scale is not None and (keep_normed or cos is None)


def outputs_of(x: Tensor, scale: Tensor | None, cos: Tensor | None, keep_normed: bool) -> tuple[Tensor, Tensor]:
    """Room for normed heads and for rotated ones; without numbers for what is no result."""
    given = gives_normed(scale, cos, keep_normed), cos is not None
    normed, rotated = (x.new_empty(x.shape if one else 0) for one in given)
    return normed, rotated


def given(of_normed: Tensor | None, of_rotated: Tensor | None) -> Tensor:
    """The gradient that is there, one of two."""
    upstream = of_normed if of_rotated is None else of_rotated
    assert upstream is not None, "nothing comes back without a gradient"
    return upstream


def gradient_of(x: Tensor) -> Tensor:
    """Room for the gradient of x, tokens before heads: what comes back through a projection's view is dense."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def forward(
    x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """Normed heads and rotated ones; arguments as `rotated_heads`."""
    from polysketch.ops.rotated_heads.triton.programs.forward import rotated_heads

    normed, rotated = outputs_of(x, scale, cos, keep_normed)
    written = (normed if gives_normed(scale, cos, keep_normed) else None, None if cos is None else rotated)
    read = _unit_stride(x)
    call = _Call("rotated_heads", x, cos, eps)
    call.launch(rotated_heads, read, *map(_contiguous, (scale, cos, sin)), *written, *_strides(read))
    return normed, rotated


def backward(
    of_normed: Tensor | None,
    of_rotated: Tensor | None,
    x: Tensor | None,
    scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of scale, from those of normed heads and of rotated ones; None for one that is zero."""
    from polysketch.ops.rotated_heads.triton.programs.backward import rotated_heads_backward

    upstream = given(of_normed, of_rotated)
    if of_rotated is None:
        cos = sin = None
    found = gradient_of(upstream)
    call = _Call("rotated_heads_backward", upstream, cos, eps)
    sums = None if scale is None else upstream.new_empty(call.tiles, scale.shape[0], dtype=torch.float32)
    read = None if x is None else _unit_stride(x)
    pointers = (read, *map(_contiguous, (scale, cos, sin, of_normed, of_rotated)), found, sums)
    call.launch(rotated_heads_backward, *pointers, *_strides(read), *_strides(found))
    if scale is None or sums is None:
        return found, upstream.new_empty(0)
    return found, sums.sum(0).to(scale.dtype)


class _Call:
    """A launch of a program.

    Attributes:
        tiles: of tokens.
    """

    def __init__(self, program: str, heads: Tensor, cos: Tensor | None, eps: float) -> None:
        batch, num_heads, self._length, width = heads.shape
        self._rows = batch * self._length
        self._angle_rows = 0 if cos is None or cos.dim() == 2 or cos.shape[0] == 1 else self._length
        lanes = covering_block(width // 2)
        self._use = configuration(program, heads.device, inputs=2 * lanes, operand_bytes=heads.element_size())
        self.tiles = num_blocks(self._rows, self._use["TOKENS"])
        self._programs = self.tiles * num_blocks(num_heads, self._use["GROUP"])
        self._constants: dict[str, Any] = {"EPSILON": eps, "HEADS": num_heads, "WIDTH": width, "LANES": lanes}

    def launch(self, kernel: Any, *arguments: Tensor | int | None) -> None:
        """Run it on tensors and strides."""
        sizes = (self._angle_rows, self._length, self._rows)
        launch(kernel, self._programs, *arguments, *sizes, configuration=self._use, **self._constants)


def _unit_stride(x: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of batch, head and token; none where nothing is read."""
    return (0, 0, 0) if x is None else x.stride()[:3]
