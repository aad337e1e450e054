"""Norm and sketch of heads as programs in Triton (`programs`).

Design, for T rows (tokens times heads) of d inputs and r features, numbers of s bytes:

    pass         operations   bytes                   a program
    forward      4 T d r      s T (2 d + r)           a tile of rows
    backward     8 T d r      s T (3 d + r) and sums  a tile of rows

Bytes are the floor, and decide: at d = 64 and r = 32 there are 26 operations a byte. A row is in registers from its
read on. Nothing is kept for backward, which makes the norm and the products again from x. Gradients of scale and bias
are summed over a tile by its program and then over tiles, without atomic additions: the same call gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch, precision

WIDEST = 256
"""Numbers of a head: its rows are in registers as a whole."""


def why_not(x: Tensor, scale: Tensor, matrices: Tensor | None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    reason = triton.why_not(x)
    if reason is not None:
        return reason
    if not scale.is_floating_point():
        return f"the triton backend takes a scale of floating point, got {scale.dtype}"
    if not 1 <= x.shape[3] <= WIDEST:
        return f"the triton backend takes heads of up to {WIDEST} numbers, got {tuple(x.shape)}"
    if x.shape[:3].numel() >= 2**31:
        return f"the triton backend takes fewer than 2^31 rows of heads, got {tuple(x.shape)}"
    if matrices is None:
        return None
    if matrices.dtype != x.dtype:
        return f"the triton backend takes matrices in the dtype of x, got {matrices.dtype} and {x.dtype}"
    if x.shape[1] % matrices.shape[0]:
        return f"the triton backend takes a multiple of {matrices.shape[0]} heads, one run a map, got {tuple(x.shape)}"
    if matrices.shape[1:3] != (2, x.shape[3]) or not matrices.numel():
        return f"the triton backend takes two matrices a map, as high as heads are wide, got {tuple(matrices.shape)}"
    return None


def outputs_of(x: Tensor, matrices: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for normed heads and for features, none without matrices."""
    return x.new_empty(x.shape), x.new_empty(*x.shape[:3], 0 if matrices is None else matrices.shape[3])


def gradient_of(x: Tensor) -> Tensor:
    """Room for the gradient of x, laid out as x is: what comes back through a view of tokens before heads is dense."""
    found = torch.empty_like(x)
    return found if found.stride(3) == 1 else x.new_empty(x.shape)


def forward(x: Tensor, scale: Tensor, bias: Tensor, matrices: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Normed heads and features; arguments as `head_sketch`."""
    from polysketch.ops.head_sketch.triton.programs.forward import head_sketch

    call = _Call(x, matrices, eps)
    normed, features = outputs_of(x, matrices)
    use = call.configuration("head_sketch")
    tiles = num_blocks(call.rows, use["TOKENS"])
    given = (call.x, scale.contiguous(), bias.contiguous(), call.matrices, normed, features)
    launch(head_sketch, tiles * call.maps, *given, *call.places, tiles, configuration=use, **call.constants)
    return normed, features


def backward(
    of_normed: Tensor | None,
    of_features: Tensor | None,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    matrices: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of scale and bias as one, (2, width), from those of normed heads and of features.

    None stands for a gradient that is zero.
    """
    from polysketch.ops.head_sketch.triton.programs.backward import head_sketch_backward

    if matrices is None or of_features is None:
        matrices = of_features = None
    call = _Call(x, matrices, eps)
    found = gradient_of(x)
    use = call.configuration("head_sketch_backward")
    tiles = num_blocks(call.rows, use["TOKENS"])
    sums = x.new_empty(tiles * call.maps, 2, x.shape[3], dtype=torch.float32)
    upstream = [None if one is None else one.contiguous() for one in (of_normed, of_features)]
    given = (call.x, scale.contiguous(), bias.contiguous(), call.matrices, *upstream, found, sums)
    strides = found.stride()[:3]
    launch(
        *(head_sketch_backward, tiles * call.maps, *given, *call.places, *strides, tiles),
        configuration=use,
        **call.constants,
    )
    return found, sums.sum(0).to(torch.promote_types(scale.dtype, bias.dtype))


class _Call:
    """What every launch of a call needs.

    Attributes:
        x: with the numbers of a row side by side.
        matrices: contiguous; None for the norm alone.
        maps: owners of matrices, each of heads / maps heads; one without matrices.
        rows: of one map.
        constants: of every program.
    """

    def __init__(self, x: Tensor, matrices: Tensor | None, eps: float) -> None:
        self.x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
        self.matrices = None if matrices is None else matrices.contiguous()
        self.maps, self._features = (1, 0) if matrices is None else (matrices.shape[0], matrices.shape[3])
        self.rows = x.shape[:3].numel() // self.maps
        self.constants = self._constants(eps)

    @property
    def places(self) -> tuple[int, ...]:
        """Where the rows are: strides of batch, head and token, tokens of a head, rows of a map."""
        return (*self.x.stride()[:3], self.x.shape[2], self.rows)

    def configuration(self, program: str) -> dict[str, int]:
        """The constants with which a program is launched."""
        size = 2 if self.x.dtype == torch.bfloat16 else 4
        sizes = {"inputs": covering_block(self.x.shape[3]), "features": self._features}
        use = configuration(program, self.x.device, **sizes, operand_bytes=size)
        return {**use, "BLOCK": min(use["BLOCK"], covering_block(self._features))}

    def _constants(self, eps: float) -> dict[str, Any]:
        import triton.language as tl

        return {
            "EPSILON": eps,
            "HEADS": self.x.shape[1],
            "MAPS": self.maps,
            "INPUTS": self.x.shape[3],
            "FEATURES": self._features,
            "LANES": covering_block(self.x.shape[3]),
            "PRECISION": precision(self.x.dtype),
            "DOT": tl.bfloat16 if self.x.dtype == torch.bfloat16 else tl.float32,
        }
