"""Causal convolutions as programs in Triton (`programs`).

Design, for N entries of x, filters of `size` taps, numbers of s bytes:

    pass         operations    bytes                   a program
    forward      2 N size      2 s N                   a tile of tokens and channels
    backward     4 N size      3 s N and sums          a tile of tokens and channels

Bytes decide. A program reads the rows of its tile once for every tap, each time a token further: after the first time
nearly all of them are in the cache. Backward reads x once: the gradient of a tap sums x times what came back some
tokens later, which the gradient of x needs too. Gradients of taps are summed over a tile by its program and then over
tiles, without atomic additions: the same call gives the same bits.
"""

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch

_TAIL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ROWS = 2**30
_WIDE = 256  # from here on channels fill any block, and how many there are makes no difference


def why_not(x: Tensor, weight: Tensor, tail: Tensor | None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    reason = triton.why_not(x)
    if reason is not None:
        return reason
    if not weight.is_floating_point():
        return f"the triton backend takes a weight of floating point, got {weight.dtype}"
    if tail is not None and tail.dtype not in _TAIL_DTYPES:
        return f"the triton backend takes a tail in float32, bfloat16 or float16, got {tail.dtype}"
    if x.shape[:3].numel() >= _MOST_ROWS:
        return f"the triton backend takes fewer than 2^30 tokens of heads, got {tuple(x.shape)}"
    return None


def output_of(x: Tensor) -> Tensor:
    """Room for the output, contiguous."""
    return x.new_empty(x.shape)


def gradient_of(x: Tensor) -> Tensor:
    """Room for the gradient of x, laid out as x is: what comes back through a view of tokens before heads is dense."""
    found = torch.empty_like(x)
    return found if found.stride(3) == 1 else x.new_empty(x.shape)


def gradient_of_tail(x: Tensor, tail: Tensor | None) -> Tensor:
    """Room for the gradient of a tail; empty without one."""
    return x.new_empty(0) if tail is None else tail.new_empty(tail.shape)


def forward(x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> Tensor:
    """The output; arguments as the operator's."""
    from polysketch.ops.convolution.triton.programs.forward import causal_convolution

    output, x = output_of(x), _unit_stride(x)
    use, constants = _configuration("causal_convolution", x, taps), _constants(x, taps)
    tiles = num_blocks(x.shape[2], use["TOKENS"])
    launch(
        *(causal_convolution, _programs(x, tiles, use), x, taps.contiguous(), *_dense(key_mask, tail), output),
        *(*x.stride()[:3], x.shape[2], tiles),
        configuration=use,
        **constants,
    )
    return output


def backward(
    gradient: Tensor, x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, taps and tail; arguments as the operator's."""
    from polysketch.ops.convolution.triton.programs.backward import causal_convolution_backward

    of_x, of_tail = gradient_of(x), gradient_of_tail(x, tail)
    gradient, x = _unit_stride(gradient), _unit_stride(x)
    use, constants = _configuration("causal_convolution_backward", x, taps), _constants(x, taps)
    # The tail's rows are those before the first.
    tiles = num_blocks(x.shape[2] + (0 if tail is None else tail.shape[2]), use["TOKENS"])
    sums = taps.new_empty(x.shape[0] * tiles, *taps.shape)
    launch(
        *(causal_convolution_backward, _programs(x, tiles, use), gradient, x, taps.contiguous()),
        *(*_dense(key_mask, tail), of_x, None if tail is None else of_tail, sums),
        *(*gradient.stride()[:3], *x.stride()[:3], *of_x.stride()[:3], x.shape[2], tiles),
        configuration=use,
        **constants,
    )
    return of_x, sums.sum(0), of_tail


def _programs(x: Tensor, tiles: int, use: dict[str, int]) -> int:
    return x.shape[0] * x.shape[1] * tiles * num_blocks(x.shape[3], use["BLOCK"])


def _configuration(program: str, x: Tensor, taps: Tensor) -> dict[str, int]:
    """The constants with which a program is launched."""
    block = min(covering_block(x.shape[3]), _WIDE)
    aligned = int(x.shape[3] % 16 == 0)  # else numbers are read one by one, by as many registers
    sizes = {"size": taps.shape[1], "width": block, "aligned": aligned, "bytes": x.element_size()}
    use = configuration(program, x.device, **sizes)
    return {**use, "BLOCK": min(use["BLOCK"], block)}


def _constants(x: Tensor, taps: Tensor) -> dict[str, int]:
    """Of every program."""
    return {"HEADS": x.shape[1], "WIDTH": x.shape[3], "SIZE": taps.shape[1]}


def _unit_stride(x: Tensor) -> Tensor:
    """With the channels of a token side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """A mask and a tail, which are small."""
    return [None if one is None else one.contiguous() for one in tensors]
