"""The low-rank sketch as programs in Triton (`programs`).

Design, for T rows (tokens times heads) of d inputs and m features, rank t, degree p, numbers of s bytes:

    pass                    operations      bytes                      a program
    features                2 T t p d m     s T (d + m)                a tile of rows by a tile of features
    gradient of x           4 T t p d m     s T (2 d + m)              a tile of rows, through all features
    gradient of factors     4 T t p d m     s T (d + m) and the sums   a tile of features, a term, a span of rows

Operations and bytes are the floor, but for the maps, which both gradients make again. PyTorch's operations write and
read every one of T t p m numbers of the maps several times. Here no map reaches the memory: products of matrices are in
the dtype of x with float32 sums, and their products are taken in registers. Factors are small: they come from a cache,
which larger tiles of rows ask less often. Gradients of factors are summed apart for every span and then added, without
atomic additions: the same call gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch, precision

HIGHEST_DEGREE = 8
"""Maps of so many factors are in registers at once."""
LARGEST_TERM = 1024
"""Numbers for each feature in the factors of a term, whose gradients are in registers at once."""
_PROGRAMS = 512  # that sum gradients of factors: a few for every multiprocessor, whatever the device, for the same bits
_LEAST_TILES = 4  # that one of them goes through


def why_not(x: Tensor, factors: Tensor) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    reason = triton.why_not(x)
    if reason is not None:
        return reason
    if factors.dtype != x.dtype:
        return f"the triton backend takes factors in the dtype of x, got {factors.dtype} and {x.dtype}"
    _, rank, degree, inputs, features = factors.shape
    if not rank * degree * inputs * features:
        return f"the triton backend takes factors that have numbers, got {tuple(factors.shape)}"
    if degree > HIGHEST_DEGREE or degree * covering_block(inputs) > LARGEST_TERM:
        return (
            f"the triton backend takes degrees up to {HIGHEST_DEGREE}, and degree times inputs, rounded to a power of"
            f" two above, up to {LARGEST_TERM}; got degree {degree} and {inputs} inputs"
        )
    if x.shape[:3].numel() >= 2**31:
        return f"the triton backend takes fewer than 2^31 rows of heads, got {tuple(x.shape)}"
    return None


def forward(x: Tensor, factors: Tensor) -> Tensor:
    """The features; arguments as `low_rank_sketch`."""
    from polysketch.ops.low_rank_sketch.triton.programs.features import low_rank_sketch

    call = _Call(x, factors)
    features = x.new_empty(*x.shape[:3], factors.shape[-1])
    use = call.configuration("low_rank_sketch")
    tiles = num_blocks(call.rows, use["TOKENS"])
    programs = call.slices(use) * tiles * call.maps
    launch(low_rank_sketch, programs, *call.tensors, features, *call.places, tiles, configuration=use, **call.constants)
    return features


def backward(upstream: Tensor, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the factors; these are summed in float32, always in the same order."""
    call, upstream = _Call(x, factors), upstream.contiguous()
    return _inputs_backward(call, upstream), _factors_backward(call, upstream).to(factors.dtype)


def _inputs_backward(call: "_Call", upstream: Tensor) -> Tensor:
    from polysketch.ops.low_rank_sketch.triton.programs.backward import low_rank_sketch_inputs_backward

    of_x = call.x.new_empty(call.x.shape)
    use = call.configuration("low_rank_sketch_inputs_backward")
    tiles = num_blocks(call.rows, use["TOKENS"])
    launch(
        low_rank_sketch_inputs_backward,
        tiles * call.maps,
        *(*call.tensors, upstream, of_x, *call.places, tiles),
        configuration=use,
        **call.constants,
    )
    return of_x


def _factors_backward(call: "_Call", upstream: Tensor) -> Tensor:
    """In float32."""
    from polysketch.ops.low_rank_sketch.triton.programs.backward import low_rank_sketch_factors_backward

    use = call.configuration("low_rank_sketch_factors_backward")
    tiles, slices = num_blocks(call.rows, use["TOKENS"]), call.slices(use) * call.factors.shape[1] * call.maps
    tiles_per_span = max(_LEAST_TILES, num_blocks(tiles * slices, _PROGRAMS))
    spans = num_blocks(tiles, tiles_per_span)
    sums = call.factors.new_empty(spans, *call.factors.shape, dtype=torch.float32)
    launch(
        low_rank_sketch_factors_backward,
        spans * slices,
        *(*call.tensors, upstream, sums, *call.places, tiles, tiles_per_span, spans),
        configuration=use,
        **call.constants,
    )
    return sums.sum(0)


class _Call:
    """What every launch of a call needs.

    Attributes:
        x: with the numbers of a row side by side.
        factors: contiguous.
        maps: factors' owners, each of heads / maps heads.
        rows: of one map.
        constants: of every program.
    """

    def __init__(self, x: Tensor, factors: Tensor) -> None:
        self.x, self.factors = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous(), factors.contiguous()
        self.maps = factors.shape[0]
        self.rows = x.shape[:3].numel() // self.maps
        self.constants = self._constants()

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The first arguments of every program."""
        return self.x, self.factors

    @property
    def places(self) -> tuple[int, ...]:
        """Where the rows are: strides of batch, head and token, tokens of a head, rows of a map."""
        return (*self.x.stride()[:3], self.x.shape[2], self.rows)

    def configuration(self, program: str) -> dict[str, int]:
        """The constants with which a program is launched."""
        _, rank, degree, inputs, features = self.factors.shape
        lanes = covering_block(inputs)
        size = 2 if self.x.dtype == torch.bfloat16 else 4
        sizes = {"inputs": lanes, "features": features, "rank": rank, "degree": degree, "term": degree * lanes}
        use = configuration(program, self.x.device, **sizes, operand_bytes=size)
        return {**use, "BLOCK": min(use["BLOCK"], covering_block(features))}

    def slices(self, use: dict[str, int]) -> int:
        """Tiles of features."""
        return num_blocks(self.factors.shape[-1], use["BLOCK"])

    def _constants(self) -> dict[str, Any]:
        import triton.language as tl

        maps, rank, degree, inputs, features = self.factors.shape
        sizes = {
            "INPUTS": inputs,
            "FEATURES": features,
            "RANK": rank,
            "DEGREE": degree,
            "LANES": covering_block(inputs),
        }
        return {
            "HEADS": self.x.shape[1],
            "MAPS": maps,
            **sizes,
            "PRECISION": precision(self.x.dtype),
            "DOT": tl.bfloat16 if self.x.dtype == torch.bfloat16 else tl.float32,
        }
