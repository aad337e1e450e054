"""Attention alone, 1k to 128k tokens: this library's against the fused kernels of scaled_dot_product_attention."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Bench, Cases, Labels
from polysketch.benchmarking import calls, floors
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.way_names import FUSED, Sizes
from polysketch.benchmarking.ways import Way, way

_LONGEST_CALL = 1.5  # seconds; a series that would take longer is not continued
_FEATURES = 256  # of power 1, beside flash-linear-attention's
_DELTA = 48  # features of the delta rule, of two factors
_DEGREE = 4  # of the low-rank sketch
_ITEMSIZE = 2  # bfloat16
_BOTH = "forward+backward"
BIDIRECTIONAL = ", bidirectional"
"""Behind the name of a series in which every token sees all others."""

_EXPONENTS = (15, 17, 13, 11, 14, 12, 16, 10)  # of 2: lengths, where time runs out the last are left out


def all_series() -> dict[str, Way]:
    """The fused kernels first, then features given, then whole mechanisms, random and learned."""
    sizes = [Sizes(size, 256) for size in (32, 64)]
    found = {name: way(name, Sizes()) for name in FUSED}
    if importlib.util.find_spec("fla") is not None:
        found[f"fla linear m={_FEATURES}"] = Way("", _fla, _power_one_floor)
    found |= {f"features r={each.sketch_size}": way("given", each) for each in sizes}
    found["features r=32 local=1024"] = way("given", Sizes(32, 1024))
    found |= {f"{kind} r={each.sketch_size}": way(kind, each) for kind in ("random", "learned") for each in sizes}
    # The same function as flash-linear-attention's.
    power_one = partial(calls.linear, features=_FEATURES, power=1, offset=0.0, normalize=False)
    found[f"features m={_FEATURES}, power 1"] = Way("", power_one, _power_one_floor)
    found[f"delta rule, two factors, m={_DELTA}"] = Way("", partial(calls.delta, features=_DELTA), _delta_floor)
    found["polysketch"] = way("polysketch", Sizes())
    for name, backend in (("low-rank sketch", "auto"), ("low-rank sketch by PyTorch", "reference")):
        sketch = partial(calls.low_rank, features=_FEATURES, degree=_DEGREE, backend=backend)
        found[f"{name} m={_FEATURES}"] = Way("", sketch, _low_rank_floor)
    found["hyper"] = way("hyper", Sizes())
    for name in ("sdpa flash", "sdpa cudnn", "hyper"):
        found[f"{name}{BIDIRECTIONAL}"] = _bidirectional(found[name])
    return {**found, "polynomial degree=4": way("polynomial", Sizes())}


def _bidirectional(one: Way) -> Way:
    """The same where every token sees all others."""
    return replace(
        one,
        prepare=lambda shape, *where: one.prepare(replace(shape, causal=False), *where),
        floor=lambda shape, **counted: one.floor(replace(shape, causal=False), **counted),
    )


def _power_one_floor(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    return floors.cumulative_sums(shape, _FEATURES, itemsize=itemsize).times(3 if backward else 1)


def _delta_floor(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    """Backward is the rule in reverse, and the gradients of sums, which are as much as two passes more."""
    row = (_DELTA + shape.head_dim + 1) * itemsize + 4 * shape.head_dim  # written in float32
    return Floor(shape.rows * _DELTA**2 * shape.head_dim, shape.rows * row).times(4 if backward else 1)


def _low_rank_floor(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    """Backward makes the maps again, and two products for each."""
    products = 2 * shape.rows * _DEGREE * shape.head_dim * _FEATURES
    forward = shape.rows * (shape.head_dim + _FEATURES) * itemsize
    of_x = shape.rows * shape.head_dim * itemsize
    return Floor(4 * products, 2 * forward + of_x) if backward else Floor(products, forward)


def _fla(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """flash-linear-attention's chunked linear attention, heads after tokens as it wants them."""
    from fla.ops.linear_attn import chunk_linear_attn

    leaves = calls.linear(shape, device, dtype, features=_FEATURES, power=1).leaves
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in leaves)
    return Call(lambda: chunk_linear_attn(query, key, value, normalize=False)[0], [query, key, value])


def cases(*, quick: bool, match: Sequence[str] = ()) -> list[Labels]:
    """All points, in the order they are timed: neighbours are compared, so lengths are the outer loop.

    A constant number of tokens first, from the lengths that targets are for; one sequence afterwards.

    Args:
        quick: tiny sizes.
        match: parts of the names of those series that are wanted; none for all.
    """
    tokens, lengths = (256, [64, 128]) if quick else (2**17, [2**exponent for exponent in _EXPONENTS])
    whole = [(tokens // length, length) for length in lengths]
    one = [(1, length) for length in lengths if length < tokens]
    return [
        {"series": name, "batch": batch, "length": length, "direction": direction}
        for batch, length in [*whole, *one]
        for direction in ("forward", _BOTH)
        for name in all_series()
        if not match or any(part in name for part in match)
    ]


def time_attention(bench: Bench) -> None:
    """Time what fits and is not in the journal."""
    Cases("time", bench, _series_of, partial(_measure, bench, all_series()), _LONGEST_CALL).run(
        cases(quick=bench.quick, match=bench.match)
    )


def _series_of(labels: Labels) -> tuple:
    return labels["series"], labels["direction"], labels["batch"] == 1


def _measure(bench: Bench, series: dict[str, Way], labels: Labels) -> dict[str, Any]:
    """The time, and what it means: the rate by the operations counted, twice as many backward as forward, and shares of
    what the device can do at best.
    """
    one, backward = series[labels["series"]], labels["direction"] == _BOTH
    shape = Shape(labels["batch"], labels["length"], 2 if bench.quick else 12)
    forward, floor = (one.floor(shape, backward=both, itemsize=_ITEMSIZE) for both in (False, backward))
    call = one.prepare(shape, bench.device, torch.bfloat16)
    function = calls.forward_backward(call) if backward else calls.forward(call)
    peak = peak_memory(bench.device, function)
    timing = bench.clock.measure(function, limit_seconds=0.25)
    rate = forward.operations * (3 if backward else 1) / timing.seconds
    return {
        **vars(timing),
        "tokens_per_second": shape.tokens / timing.seconds,
        "peak_bytes": peak,
        "floor_seconds": floor.seconds(bench.rates),
        "tflops": rate / 1e12,
        "matrix_share": rate / bench.rates.operations,
        "bandwidth_share": floor.bytes / timing.seconds / bench.rates.bandwidth,
    }
