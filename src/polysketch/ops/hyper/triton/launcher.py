"""HyperAttention by Triton programs: who is launched, on what.

Forward: each query's own block, then tiles, a part of the meetings at a time: no query is in two tiles of a part, and
each goes on with the sum of weights that the part before has left, as in C++. Backward makes weights again from the
sums as they were at the end. Gradients of queries are added up part by part. Those of keys are written apart for every
run of tiles with the same keys, and then added up by a list for every key: without atomic additions, so that the same
call gives the same bits. The lists are sorted on the device; no number is read from it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.hyper.meetings import Meetings
from polysketch.ops.hyper.triton.lists import lists_of_keys, runs_of_tiles
from polysketch.ops.hyper.types import Given
from polysketch.ops.linear.triton.call import covering_block

WIDEST = 128
"""Largest head_dim and value_dim: wider blocks do not fit the registers."""
_LOWEST = -1e29  # LOWEST of steps.py
_RUN = 8  # tiles whose keys' gradients one program adds up: more leave fewer programs
_PARTIAL = 2**27  # numbers of the keys' gradients that are written apart at once: half a GiB


def why_not(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    reasons = (triton.why_not(tensor) for tensor in (query, key, value))
    reason = next((one for one in reasons if one is not None), None)
    if reason is not None:
        return reason
    widths = (query.shape[-1], value.shape[-1])
    if not 1 <= min(widths) <= max(widths) <= WIDEST:
        return f"the triton backend takes vectors of 1 to {WIDEST}, got {widths[0]} and {widths[1]}"
    return None


def forward(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Output, in float32; and of each query, (batch, heads, n), the largest score and the sum of weights over it."""
    from polysketch.ops.hyper.triton.programs.blocks import hyper_block_forward
    from polysketch.ops.hyper.triton.programs.tiles import hyper_tile_forward

    call = _Call(given)
    rows = given.query.shape[:3]
    output, peak, mass = found = (call.new(*rows, given.value.shape[3]), call.new(*rows), call.new(*rows))
    if given.block:
        call.of_blocks(hyper_block_forward, "ROWS", *call.inputs, call.real, *found)
    else:
        for tensor, start in ((output, 0.0), (peak, _LOWEST), (mass, 0.0)):
            tensor.fill_(start)
    for part in call.parts():
        call.of_tiles(hyper_tile_forward, part, *call.inputs, *call.met, *found)
    return output, peak, mass


def backward(given: Given, found: tuple[Tensor, Tensor, Tensor], upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from what `forward` gave and the gradient of its output."""
    from polysketch.ops.hyper.triton.programs import blocks
    from polysketch.ops.hyper.triton.programs.tiles import hyper_tile_grad_query

    call = _Call(given)
    output, peak, mass = found
    upstream = upstream.contiguous()
    share = torch.where(mass == 0, 0.0, 1 / mass)
    mean = (upstream.float() * output).sum(-1)
    of_rows = (upstream.to(given.query.dtype), peak, share, mean)
    gradients = of_query, of_key, of_value = [call.new(*x.shape) for x in given.tensors.values()]
    if given.block:
        call.of_blocks(blocks.hyper_block_grad_query, "ROWS", *call.inputs, call.real, *of_rows, of_query)
        call.of_blocks(blocks.hyper_block_grad_key_value, "KEYS", *call.inputs, call.real, *of_rows, of_key, of_value)
    else:
        for gradient in gradients:
            gradient.zero_()
    for part in call.parts():
        call.of_tiles(hyper_tile_grad_query, part, *call.inputs, *call.met, *of_rows, of_query)
    _add_through_tiles(given, of_rows, of_key, of_value)
    of_query, of_key, of_value = (x.to(like.dtype) for x, like in zip(gradients, given.tensors.values(), strict=True))
    return of_query, of_key, of_value


def _add_through_tiles(given: Given, of_rows: tuple[Tensor, ...], of_key: Tensor, of_value: Tensor) -> None:
    """Add what tiles say of keys and values, piece by piece: a piece is some tiles of some rows of the batch."""
    batch, heads, _, width = of_key.shape
    tiles, keys = given.met.key.shape[2:]
    of_tile = heads * keys * (width + of_value.shape[3])
    rows = max(1, _PARTIAL // (of_tile * tiles))
    together = tiles if rows > 1 else max(_RUN, _PARTIAL // of_tile // _RUN * _RUN)
    for row in range(0, batch, rows):
        piece = slice(row, row + rows)
        call = _Call(_of_batch(given, piece))
        tensors = [x[piece] for x in (*of_rows, of_key, of_value)]
        for first in range(0, tiles, together):
            _add_through(call, range(first, min(first + together, tiles)), tensors[:-2], *tensors[-2:])


def _add_through(call: "_Call", part: range, of_rows: Sequence[Tensor], of_key: Tensor, of_value: Tensor) -> None:
    """Add what some tiles say, first apart for every run of tiles, and then for every key."""
    from polysketch.ops.hyper.triton.programs.keys import hyper_sum_by_key, hyper_tile_grad_key_value

    batch, heads, length, width = of_key.shape
    query_places, key_places, log_weights = (x[:, :, part.start : part.stop] for x in call.met)
    met = Meetings(query_places, key_places, log_weights, (len(part),))
    size = call.configuration("hyper_tile_grad_key_value")["KEYS"]
    runs = runs_of_tiles(met, size, _RUN)
    order, edges = lists_of_keys(met, runs, size, length)
    keys = key_places.shape[3]
    shape = (batch, heads, len(part), keys)
    partial = call.new(*shape, width), call.new(*shape, of_value.shape[3])
    tensors = (*call.inputs, *call.met, runs, *of_rows, *partial)
    call.of_tiles(hyper_tile_grad_key_value, part, *tensors, of="KEYS", among=keys)
    use = call.configuration("hyper_sum_by_key")
    programs = batch * heads * -(-length // use["TOKENS"])
    arguments = (*partial, order, edges, of_key, of_value, length, order.shape[1])
    triton.launch(hyper_sum_by_key, programs, *arguments, configuration=use, **call.widths)


def _of_batch(given: Given, rows: slice) -> Given:
    """Some rows of the batch, without their mask: of tiles alone."""
    met = Meetings(given.met.query[rows], given.met.key[rows], given.met.log_weight[rows], given.met.parts)
    query, key, value = (x[rows] for x in given.tensors.values())
    return given._replace(query=query, key=key, value=value, real=None, met=met)


class _Call:
    """One call as launches have it."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.inputs = [x if x.stride(3) == 1 else x.contiguous() for x in given.tensors.values()]
        self.real = None if given.real is None else given.real.contiguous()
        self.met = [x.contiguous() for x in given.met[:3]]
        self._strides = [stride for x in self.inputs for stride in x.stride()[:3]]

    def new(self, *shape: int) -> Tensor:
        """Uninitialised float32 memory on the call's device."""
        return self.given.query.new_empty(shape, dtype=torch.float32)

    def parts(self) -> Iterator[range]:
        """The tiles of each part."""
        first = 0
        for size in self.given.met.parts:
            yield range(first, first + size)
            first += size

    def of_blocks(self, kernel: Any, of: str, *tensors: Tensor | None) -> None:
        """Launch over the tokens of all blocks, by pieces of the size that `of` names, of queries or of keys."""
        given, use = self.given, self.configuration(kernel.__name__)
        length = given.query.shape[2]
        heads = (given.query if of == "ROWS" else given.key).shape[:2].numel()
        programs = heads * -(-length // given.block) * -(-given.block // use[of])
        numbers = (*self._strides, length, given.block, given.scale)
        triton.launch(kernel, programs, *tensors, *numbers, configuration=use, **self.constants)

    def of_tiles(self, kernel: Any, part: range, *tensors: Tensor, of: str = "ROWS", among: int | None = None) -> None:
        """Launch over some tiles, by pieces of the size that `of` names: of a tile's rows, or `among` so many."""
        given, use = self.given, self.configuration(kernel.__name__)
        (batch, heads, tiles, rows), keys = given.met.query.shape, given.met.key.shape[3]
        programs = batch * heads * len(part) * -(-(rows if among is None else among) // use[of])
        numbers = (given.query.shape[2], tiles, part.start, len(part), rows, keys, given.scale)
        triton.launch(kernel, programs, *tensors, *self._strides, *numbers, configuration=use, **self.constants)

    def configuration(self, program: str) -> dict[str, int]:
        """The tuned constants of a program."""
        query, value = self.given.query, self.given.value
        size = max(covering_block(query.shape[3]), covering_block(value.shape[3]))
        dtype = str(query.dtype).removeprefix("torch.")
        return triton.configuration(
            program, query.device, dtype=dtype, precision=triton.precision(query.dtype), size=size
        )

    @property
    def widths(self) -> dict[str, int]:
        """Of the vectors, and powers of two that cover them."""
        head, width = self.given.query.shape[3], self.given.value.shape[3]
        return {"HEAD": head, "WIDTH": width, "HEAD_BLOCK": covering_block(head), "WIDTH_BLOCK": covering_block(width)}

    @property
    def constants(self) -> dict[str, Any]:
        """What programs with products are compiled for."""
        import triton.language as tl  # absolute: Triton, not this module

        query, key = self.given.query, self.given.key
        return {
            **self.widths,
            "KEY_HEADS": key.shape[1],
            "SHARED": query.shape[1] // key.shape[1],
            "PRECISION": triton.precision(query.dtype),
            "DOT": tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float32,
        }
