"""The triton backend: the delta rule as programs for CUDA devices (`programs`).

Two launches. The systems of equations inside the chunks are inverted, all at once; then one program for each block of
value columns of a head goes through the chunks in turn.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import availability, configuration, launch, precision


def why_not(inputs: Inputs) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    return availability.why_not(inputs.key)


def errors(inputs: Inputs, factors: int, half: torch.dtype | None) -> Tensor:
    """(batch, heads, length, value_dim): each value less what the sums before its token say of it.

    Where `half` says that features came in half precision, products are of TF32: sums lose what is below 2^-10 of them,
    where features lost what is below 2^-8 or 2^-11.
    """
    return _errors(inputs, factors, half, reverse=False)


def errors_in_reverse(inputs: Inputs, factors: int, half: torch.dtype | None) -> Tensor:
    """The same of tokens in reverse: the last one comes first, and none comes before it."""
    return _errors(inputs, factors, half, reverse=True)


class _Tokens(NamedTuple):
    """What a program reads or writes token after token: the first token, and strides of batch, head and token."""

    first: Tensor
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, *, reverse: bool) -> "_Tokens":
        """(batch, heads, length, ...), from its first token on or from its last one back."""
        batch, head, token = x.stride()[:3]
        return cls(x[:, :, -1:], (batch, head, -token)) if reverse else cls(x, (batch, head, token))


def _errors(inputs: Inputs, factors: int, half: torch.dtype | None, *, reverse: bool) -> Tensor:
    (_, heads, length, features), width = inputs.key.shape, inputs.value.shape[3]
    found = inputs.value.new_empty(inputs.value.shape)
    given = (_unit_stride(inputs.key), _unit_stride(inputs.value), inputs.strength, found)
    tokens = [_Tokens.of(x, reverse=reverse) for x in given]
    call: dict[str, int | str] = {"factors": factors, "features": features, "width": width}
    call["products"] = precision(torch.float32) if half is None else "tf32"
    use = configuration("delta_errors", found.device, **call)
    use["COLUMNS"] = min(use["COLUMNS"], covering_block(width))
    constants = {"HEADS": heads, "FEATURES": features, "FACTORS": factors, "PRECISION": call["products"]}
    inverse = _inverse(tokens[0], tokens[2], length, use["CHUNK"], call, constants)
    _follow_chunks(tokens, inverse, inputs.sums, length, use, constants)
    return found


def _inverse(key: _Tokens, strength: _Tokens, length: int, chunk: int, call: dict, constants: dict) -> Tensor:
    """(batch, heads, chunks, chunk, chunk): the inverse of every chunk's system."""
    from polysketch.ops.delta.triton.programs.inverse import delta_inverse

    batch, heads, chunks = *key.first.shape[:2], num_blocks(length, chunk)
    found = key.first.new_empty(batch, heads, chunks, chunk, chunk)
    use = configuration("delta_inverse", found.device, **call)
    use["DEPTH"] = min(use["DEPTH"], covering_block(constants["FEATURES"] // constants["FACTORS"]))
    launch(
        delta_inverse,
        batch * heads * chunks,
        *(key.first, strength.first, found, *key.strides, *strength.strides, length, chunks),
        configuration=use,
        CHUNK=chunk,
        **constants,
    )
    return found


def _follow_chunks(
    tokens: list[_Tokens], inverse: Tensor, initial: Tensor | None, length: int, use: dict[str, int], constants: dict
) -> None:
    """Write the errors, the last of the tensors, from key, value and strength, the others."""
    from polysketch.ops.delta.triton.programs.errors import delta_errors, sums_pieces

    batch, heads, chunks = inverse.shape[:3]
    width = tokens[1].first.shape[3]
    blocks = num_blocks(width, use["COLUMNS"])
    pieces = sums_pieces(constants["FEATURES"], constants["FACTORS"], use["ROWS"])
    sums = inverse.new_empty(batch, heads, blocks, pieces, use["ROWS"], use["COLUMNS"])
    key, value, strength, found = tokens
    launch(
        delta_errors,
        batch * heads * blocks,
        *(key.first, value.first, strength.first, inverse, None if initial is None else initial.contiguous(), sums),
        *(found.first, *key.strides, *value.strides, *strength.strides, *found.strides, length, chunks),
        configuration=use,
        WIDTH=width,
        **constants,
    )


def _unit_stride(x: Tensor) -> Tensor:
    """The tensor with neighbouring columns side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
