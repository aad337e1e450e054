"""Attention alone, 1k to 128k tokens: this library's against the fused kernels of scaled_dot_product_attention."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases import Bench, Cases, Labels
from polysketch import ops
from polysketch.benchmarking import calls, floors
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.way_names import FUSED, Sizes
from polysketch.benchmarking.ways import Way, way

_LONGEST_CALL = 1.5  # seconds; a series that would take longer is not continued
_LOCAL = 256
_FEATURES = 256  # of power 1, beside flash-linear-attention's
_HALF = 24  # features of each of two factors, of the delta rule
_ITEMSIZE = 2  # bfloat16
_BOTH = "forward+backward"
SDPA = FUSED


Counted = Callable[[Shape], float]
"""Operations of the forward pass, as rates are stated: of exact attention half of both products, of ours
4 (r (r + 1) / 2) (h + 1) + 2 local (h + 1) a token and head; backward twice as many."""

Series = tuple[Way, Counted]


def all_series() -> dict[str, Series]:
    """The fused kernels first, then features given, then whole mechanisms, random and learned."""
    sizes, wide = [Sizes(size, _LOCAL) for size in (32, 64)], Sizes(32, 1024)
    found: dict[str, Series] = {name: (way(name, Sizes()), _exact) for name in SDPA}
    if importlib.util.find_spec("fla") is not None:
        name = f"fla linear m={_FEATURES}"
        found[name] = Way(name, _fla, _power_one_floor), _power_one_operations
    found |= {f"features r={each.sketch_size}": _sketched("given", each) for each in sizes}
    found[f"features r=32 local={wide.local}"] = _sketched("given", wide)
    found |= {f"{kind} r={each.sketch_size}": _sketched(kind, each) for kind in ("random", "learned") for each in sizes}
    name = f"features m={_FEATURES}, power 1"
    found[name] = Way(name, _power_one, _power_one_floor), _power_one_operations
    name = f"delta rule, two factors, m={2 * _HALF}"
    found[name] = Way(name, _delta, _delta_floor), _delta_operations
    return {**found, "polynomial degree=4": (way("polynomial", Sizes()), _exact)}


def _sketched(name: str, sizes: Sizes) -> Series:
    expanded = sizes.sketch_size * (sizes.sketch_size + 1) // 2

    def counted(shape: Shape) -> float:
        return shape.rows * (4 * expanded + 2 * min(sizes.local, shape.length)) * (shape.head_dim + 1)

    return way(name, sizes), counted


def _exact(shape: Shape) -> float:
    return shape.rows * 2 * shape.length * shape.head_dim


def _power_one_operations(shape: Shape) -> float:
    return shape.rows * 4 * _FEATURES * (shape.head_dim + 1)


def _power_one_floor(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    forward = floors.cumulative_sums(shape, _FEATURES, itemsize=itemsize)
    return forward.times(3) if backward else forward


def _power_one(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """The same function as flash-linear-attention's, by ours."""
    query, key, value = _given(shape, device, dtype)

    def attend() -> Tensor:
        return ops.linear_attention(query, key, value, power=1, causal=True, normalize=False).output

    return Call(attend, [query, key, value])


def _delta_operations(shape: Shape) -> float:
    return shape.rows * 4 * _HALF**2 * shape.head_dim


def _delta_floor(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    """Backward is the rule in reverse, and the gradients of sums, which are as much as two passes more."""
    row = (2 * _HALF + shape.head_dim + 1) * itemsize + 4 * shape.head_dim  # written in float32
    return Floor(_delta_operations(shape), shape.rows * row).times(4 if backward else 1)


def _delta(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """What tokens write, of sketches of length one; its products are of float32 whatever the dtype."""
    sizes = (shape.batch, shape.heads, shape.length)
    key = F.normalize(torch.randn(*sizes, 2, _HALF, device=device), dim=-1).flatten(-2)
    value, strength = torch.randn(*sizes, shape.head_dim, device=device), torch.randn(sizes, device=device).sigmoid()
    leaves = [tensor.to(dtype) for tensor in (key, value, strength)]
    return Call(lambda: ops.delta_writes(*leaves, factors=2), leaves)


def _fla(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """flash-linear-attention's chunked linear attention, heads after tokens as it wants them."""
    from fla.ops.linear_attn import chunk_linear_attn

    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in _given(shape, device, dtype))
    return Call(lambda: chunk_linear_attn(query, key, value, normalize=False)[0], [query, key, value])


def _given(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    widths = (_FEATURES, _FEATURES, shape.head_dim)
    sizes = [(shape.batch, shape.heads, shape.length, width) for width in widths]
    return [torch.randn(size, device=device, dtype=dtype) / size[3] ** 0.5 for size in sizes]


def cases(*, quick: bool) -> list[Labels]:
    """All points, in the order they are timed: neighbours are compared, so lengths are the outer loop."""
    return [
        {"series": name, "batch": batch, "length": length, "direction": direction}
        for length in ([64, 128] if quick else [2**11, 2**13, 2**15, 2**17, 2**10, 2**12, 2**14, 2**16])
        for batch in _batches(256 if quick else 2**17, length)
        for direction in ("forward", _BOTH)
        for name in all_series()
    ]


def _batches(tokens: int, length: int) -> list[int]:
    """A constant number of tokens, and one sequence."""
    return [tokens // length, 1] if tokens > length else [1]


def time_attention(bench: Bench) -> None:
    """State the floor of every point; then time what fits and is not in the journal."""
    series, points = all_series(), cases(quick=bench.quick)
    for labels in points if not bench.journal.of("floor") else ():
        floor = _floor(series, labels, bench)
        stated = {"operations": floor.operations, "bytes": floor.bytes, "seconds": floor.seconds(bench.rates)}
        bench.journal.write("floor", **labels, **stated)
    Cases("time", bench, _series_of, partial(_measure, bench, series), _LONGEST_CALL).run(points)


def _shape(labels: Labels, bench: Bench) -> Shape:
    return Shape(labels["batch"], labels["length"], 2 if bench.quick else 12)


def _series_of(labels: Labels) -> tuple:
    return labels["series"], labels["direction"], labels["batch"] == 1


def _floor(series: dict[str, Series], labels: Labels, bench: Bench) -> Floor:
    floor = series[labels["series"]][0].floor(
        _shape(labels, bench), backward=labels["direction"] == _BOTH, itemsize=_ITEMSIZE
    )
    assert floor is not None, f"{labels['series']}: expected operations that are counted"
    return floor


def _measure(bench: Bench, series: dict[str, Series], labels: Labels) -> dict[str, Any]:
    """The time, and what it means: the rate by the operations counted, and shares of what the device can do at best."""
    (one, counted), shape, floor = series[labels["series"]], _shape(labels, bench), _floor(series, labels, bench)
    backward = labels["direction"] == _BOTH
    call = one.prepare(shape, bench.device, torch.bfloat16)
    function = calls.forward_backward(call) if backward else calls.forward(call)
    peak = peak_memory(bench.device, function)
    timing = bench.clock.measure(function, limit_seconds=0.25)
    rate = counted(shape) * (3 if backward else 1) / timing.seconds
    return {
        **vars(timing),
        "tokens_per_second": shape.tokens / timing.seconds,
        "peak_bytes": peak,
        "floor_seconds": floor.seconds(bench.rates),
        "tflops": rate / 1e12,
        "matrix_share": rate / bench.rates.operations,
        "bandwidth_share": floor.bytes / timing.seconds / bench.rates.bandwidth,
    }
