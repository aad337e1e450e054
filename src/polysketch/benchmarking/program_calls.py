"""Calls of the public ops that launch Triton programs, at the shapes that matter: to be compiled, tuned, checked.

The same calls on every device: on "meta" they are compiled, on CUDA they run. Programs do not depend on lengths.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.benchmarking import calls
from polysketch.benchmarking.calls import DEGREE, Call, random
from polysketch.benchmarking.floors import Shape
from polysketch.feature_maps import LearnedSketch
from polysketch.feature_maps.learned_sketch import SketchNetwork
from polysketch.ops.learned_sketch import learned_sketch

__all__ = ["DTYPES", "OPS", "ProgramCall", "most_common_first", "program_calls"]

Prepare = Callable[[Shape, torch.device, torch.dtype], Call]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LOCAL = 256
_IN_ROWS = ", rows of a pool"
_IN_HALF, _HALF = ", sums in half precision", torch.bfloat16
_COMMON = {
    *(f"linear power 2, r={size}, h=64, local {_LOCAL}" for size in (32, 64, 128)),
    *(f"linear power 2, r=32, h={width}" for width in (64, 128)),
    "linear power 1, m=64, h=64",
    "linear two factors, m=48, h=64",
    "linear power 1, m=256, h=128, local 256",
    "linear power 2, r=32, h=64, local 256, decay, 2 queries a key",
    "sketch r=32, h=64",
    "sketch r=64, h=128",
    "low rank m=256, h=64, degree 4",
    "head sketch r=32, h=64",
    "head norm h=64",
    "convolution of 4, h=64",
    "rotated heads h=64",
    "rotated heads h=64, normed ones kept",
    "gated gelu h=64",
    "cross-entropy of 50257",
    "polynomial h=64",
    "polynomial h=128",
    "hyper h=64",
    "hyper h=128",
    "window of 256, h=64",
    "window of 256, h=64, a key beside",
    "window of 256, h=128",
    "delta two factors, m=48, h=64",
    "delta two factors, m=48, h=65",
    "delta power 1, m=64, h=64",
    "decoding power 2, r=32, h=64, local 256",
    "decoding power 1, m=64, h=64",
    "decoding two factors, m=48, h=64",
    "decoding delta, m=64, h=64",
    "decoding delta, m=64, h=64, rows of a pool",
    "decoding window of 256, h=64, rows of a pool",
}


@dataclass(frozen=True)
class ProgramCall:
    """A call of one op.

    Attributes:
        name: says op, widths and options.
        op: linear, sketch, low_rank, head_sketch, convolution, rotated_heads, gated_gelu, cross_entropy, polynomial,
            hyper, window, delta or decoding.
        dtype: name of the inputs' dtype.
        width: of a head.
        prepare: (shape, device, dtype) -> the call; random inputs.
    """

    name: str
    op: str
    dtype: str
    width: int
    prepare: Prepare

    @property
    def differentiable(self) -> bool:
        """Whether it has a backward pass."""
        return self.op not in ("cross_entropy", "decoding")

    def build(self, device: torch.device, batch: int, heads: int, length: int) -> Call:
        """The call at this size."""
        return self.prepare(Shape(batch, length, heads, self.width), device, DTYPES[self.dtype])

    def passes(self, call: Call) -> Callable[[], Any]:
        """The call that was built, forward and, where there is one, backward."""
        return calls.forward_backward(call) if self.differentiable else calls.forward(call)


def program_calls(ops_wanted: Sequence[str] = (), dtypes: Sequence[str] = tuple(DTYPES)) -> list[ProgramCall]:
    """Calls of some ops of `OPS`, or of all, in some of `DTYPES`: in bfloat16 all sizes, else the common ones."""
    return [
        ProgramCall(name, op, dtype, width, prepare)
        for op in ops_wanted or OPS
        for dtype in dtypes
        for name, width, prepare in OPS[op]()
        if dtype == "bfloat16" or name in _COMMON
    ]


def most_common_first(made: list[ProgramCall]) -> list[ProgramCall]:
    """The first call of every op and dtype, then the second ones, and so on."""
    groups: dict[tuple[str, str], list[ProgramCall]] = {}
    for call in made:
        groups.setdefault((call.op, call.dtype), []).append(call)
    turns = itertools.zip_longest(*groups.values())
    return [call for turn in turns for call in turn if call is not None]


Named = tuple[str, int, Prepare]
"""The name of a call, the width of its heads, and what prepares it."""


def _linear_calls() -> Iterator[Named]:
    """Power 2 by sketch size, head size and local part; power 1 by features; two factors; and every option once."""
    for sketch_size, width, local in itertools.product((32, 64, 16, 128), (64, 128), (_LOCAL, 0)):
        yield _linear(width, features=sketch_size, local=local)
    for features, width, local in itertools.product((64, 256), (64, 128), (_LOCAL, 0)):
        yield _linear(width, features=features, local=local, power=1)
    for power, local in itertools.product((2, 1), (_LOCAL, 0)):
        yield _linear(features=32 if power == 2 else 64, local=local, power=power, decays=True, shared=2)
    for width, decays in itertools.product((64, 128), (False, True)):
        yield _linear(width, features=48, power=1, factors=2, decays=decays)
    yield _linear(80, features=64, power=1, factors=2)  # of `polysketch`: values, a one and zeros behind
    yield _linear(features=32, causal=False)
    yield _linear(features=64, power=1, causal=False)


def _linear(width: int = 64, **options: Any) -> Named:
    flags = {
        "decay": options.get("decays"),
        "not causal": not options.get("causal", True),
        "2 queries a key": options.get("shared"),
    }
    name = ", ".join([f"linear {_sizes(width, **options)}", *(flag for flag, is_set in flags.items() if is_set)])
    return name, width, partial(calls.linear, backend="triton", **options)


def _sketch_calls() -> Iterator[Named]:
    for size, width in itertools.product((32, 64), (64, 128)):
        yield f"sketch r={size}, h={width}", width, partial(_sketch, size)


def _sketch(sketch_size: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    module = LearnedSketch(shape.head_dim, sketch_size=sketch_size).to(device, dtype)
    weights = [weight for network in module.networks for weight in cast(SketchNetwork, network).weights()]
    x = random(shape, device, dtype)
    return Call(lambda: learned_sketch(x, weights, 2, backend="triton"), [x, *weights])


def _low_rank_calls() -> Iterator[Named]:
    """Degrees of the paper, of its 256 features; a rank beyond one."""
    for width, degree in itertools.product((64, 128), (4, 2, 3, 6)):
        yield _low_rank(width, features=256, degree=degree)
    yield _low_rank(64, features=256, degree=4, rank=4)
    yield _low_rank(64, features=64, degree=4)


def _low_rank(width: int, *, features: int, degree: int, rank: int = 1) -> Named:
    name = f"low rank m={features}, h={width}, degree {degree}{f', rank {rank}' if rank > 1 else ''}"
    return name, width, partial(calls.low_rank, features=features, degree=degree, rank=rank, backend="triton")


def _head_sketch_calls() -> Iterator[Named]:
    """Norms of heads, alone and with the sketch of what comes out."""
    for size, width in itertools.product((32, 64, 128), (64, 128)):
        yield f"head sketch r={size}, h={width}", width, partial(calls.normed_heads, sketch_size=size, backend="triton")
    for width in (64, 128, 256):
        yield f"head norm h={width}", width, partial(calls.normed_heads, sketch_size=0, backend="triton")


def _convolution_calls() -> Iterator[Named]:
    """Of projections, as `polysketch` has it; with tokens before; of values, as a convolution beside attention."""
    for width in (64, 128):
        yield f"convolution of 4, h={width}", width, partial(calls.convolution, size=4, backend="triton")
    continued = partial(calls.convolution, size=4, continued=True, backend="triton")
    yield "convolution of 4, h=64, tokens before and a mask", 64, continued
    yield "convolution of 3, h=64, by head", 64, partial(calls.convolution, size=3, by_head=True, backend="triton")


def _rotated_heads_calls() -> Iterator[Named]:
    """Norm and rotation, as `polysketch` has them, which reads normed heads too, and as others do; each alone."""
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        ", normed ones kept": {"keep_normed": True},
        ", norm alone": {"rotates": False},
        ", rotation alone": {"norms": False},
    }
    for width, (kind, options) in itertools.product((64, 128, 256), kinds.items()):
        yield f"rotated heads h={width}{kind}", width, partial(calls.turned_heads, backend="triton", **options)


def _gated_gelu_calls() -> Iterator[Named]:
    """Of the projection of a layer with heads of this width."""
    for width in (64, 128):
        yield f"gated gelu h={width}", width, partial(calls.gated, backend="triton")


def _cross_entropy_calls() -> Iterator[Named]:
    """Of GPT-2's vocabulary, whose rows begin anywhere; of the next that is a multiple of 16; of bytes."""
    for vocabulary in (50_257, 50_272, 256):
        prepare = partial(calls.token_losses, vocabulary=vocabulary, backend="triton")
        yield f"cross-entropy of {vocabulary}", 64, prepare


def _polynomial_calls() -> Iterator[Named]:
    for width, causal in itertools.product((64, 128), (True, False)):
        yield f"polynomial h={width}{'' if causal else ', not causal'}", width, partial(_polynomial, causal)


def _polynomial(causal: bool, shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    tensors = [tensor / shape.head_dim**0.25 for tensor in calls.heads(shape, device, dtype)]
    return Call(lambda: ops.polynomial_attention(*tensors, degree=DEGREE, causal=causal, backend="triton"), tensors)


def _hyper_calls() -> Iterator[Named]:
    for width, causal in itertools.product((64, 128), (True, False)):
        yield f"hyper h={width}{'' if causal else ', not causal'}", width, partial(_hyper, causal)


def _hyper(causal: bool, shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    tensors, planes = calls.heads(shape, device, dtype), torch.randn(shape.head_dim, 7, device=device)
    sizes: dict[str, Any] = {"min_length": 1_024, "chunk_size": 256, "sample_size": 256}
    return Call(
        lambda: ops.hyper_attention(*tensors, hyperplanes=planes, causal=causal, **sizes, backend="triton"), tensors
    )


def _window_calls() -> Iterator[Named]:
    """As `polysketch` has it, with a key beside, and as `sliding-window`; every option once."""
    for width, beside in itertools.product((64, 128), (True, False)):
        yield _window(width, beside=beside)
    yield _window(64, beside=True, shared=2)
    yield _window(64, causal=False)
    yield _window(64, block_size=64)


def _window(width: int, *, beside: bool = False, shared: int = 1, **options: Any) -> Named:
    flags = {
        "a key beside": beside,
        "not causal": not options.get("causal", True),
        "blocks": options.get("block_size"),
        f"{shared} queries a key": shared > 1,
    }
    name = ", ".join([f"window of {_LOCAL}, h={width}", *(flag for flag, is_set in flags.items() if is_set)])
    return name, width, partial(calls.window, window=_LOCAL, beside=beside, shared=shared, backend="triton", **options)


def _delta_calls() -> Iterator[Named]:
    """Values as wide as heads, and with the one behind them that mechanisms ask for."""
    for features, width, factors in ((48, 64, 2), (48, 65, 2), (64, 64, 1), (32, 65, 2), (64, 129, 2)):
        options: dict[str, Any] = {"features": features, "factors": factors}
        yield f"delta {_sizes(width, power=1, **options)}", width, partial(calls.delta, backend="triton", **options)


def _decoding_calls() -> Iterator[Named]:
    for features, width, local in itertools.product((32, 64), (64, 128), (_LOCAL, 0)):
        yield _decoding(width, features=features, local=local, power=2)
    yield _decoding(64, features=64, power=1)
    yield _decoding(64, features=48, power=1, factors=2)
    yield _decoding(64, features=32, local=_LOCAL, power=2, rows=True)
    yield _decoding(64, features=32, local=_LOCAL, power=2, half=True)
    for width, features, rows in itertools.product((64, 128), (64, 48), (False, True)):
        yield _decoding_delta(width, features=features, rows=rows)
    yield _decoding_delta(64, features=64, rows=True, half=True)
    for width in (64, 128):
        yield f"decoding window of {_LOCAL}, h={width}{_IN_ROWS}", width, _window_step


def _decoding_delta(width: int, *, features: int, rows: bool, half: bool = False) -> Named:
    name = f"decoding delta, m={features}, h={width}{_IN_ROWS * rows}{_IN_HALF * half}"
    return name, width, partial(_delta_step, {"features": features, "rows": rows, "half": half})


def _in_rows(state: ops.LinearAttentionState) -> ops.StateRows:
    """As a server has it: every second row of another."""
    pool, rows = state.reorder(torch.arange(2 * state.batch_size) // 2), 2 * torch.arange(state.batch_size)
    return ops.StateRows(pool, rows.to(state.sums.device), state.position.clone())


def _delta_step(sizes: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """A token of the delta rule with two factors, with a one behind each value as mechanisms have it."""
    token, features = replace(shape, length=1), sizes["features"]
    query, key = (F.normalize(random(token, device, torch.float32, features), dim=-1) for _ in range(2))
    value, strength = (random(token, device, torch.float32, width) for width in (shape.head_dim + 1, 1))
    state = ops.LinearAttentionState.init(
        shape.batch,
        shape.heads,
        features,
        shape.head_dim + 1,
        factors=2,
        device=device,
        sums_dtype=_HALF if sizes["half"] else None,
    )
    given = (query, key, value, strength[..., 0].sigmoid())

    def step(state: ops.LinearAttentionState | ops.StateRows) -> Tensor:
        return ops.delta_attention_extend_(*given, state, factors=2)

    copied = _in_rows if sizes["rows"] else ops.LinearAttentionState.clone
    moved_on = copied(state)
    return Call(lambda: step(copied(state)), [query, key, value], timed=lambda: step(moved_on))


def _window_step(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """One query a row over a cache of twice as many rows."""
    cache = replace(shape, batch=2 * shape.batch, length=_LOCAL)
    (query, *_), (_, key, value) = (
        calls.heads(replace(shape, length=1), device, dtype),
        calls.heads(cache, device, dtype),
    )
    rows = 2 * torch.arange(shape.batch, device=device)
    beside = ops.BesideKey(random(replace(shape, length=1), device, dtype, 1)[..., 0], torch.zeros_like(query))
    options: dict[str, Any] = {"window": _LOCAL, "key_rows": rows, "beside": beside}
    return Call(lambda: ops.sliding_window_attention_with_cache(query, key, value, **options), [query])


def _decoding(width: int, **sizes: int) -> Named:
    kept = f"{_IN_ROWS * sizes.get('rows', 0)}{_IN_HALF * sizes.get('half', 0)}"
    return f"decoding {_sizes(width, **sizes)}{kept}", width, partial(_decoding_call, sizes)


def _decoding_call(sizes: dict[str, int], shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """A step in the middle of a chunk."""
    token, local, features = replace(shape, length=1), sizes.get("local", 0), sizes["features"]
    options: dict[str, Any] = {"power": sizes["power"], "factors": sizes.get("factors", 1)}
    query, key = (random(token, device, dtype, features) for _ in range(2))
    value, near, far = calls.heads(token, device, dtype)
    chunk: dict[str, Any] = {"local_chunk": local, "local_dim": shape.head_dim if local else 0, "device": device}
    chunk["sums_dtype"] = _HALF if sizes.get("half") else None
    state = ops.LinearAttentionState.init(shape.batch, shape.heads, features, shape.head_dim, **options, **chunk)
    state.move_to_(shape.length + local // 2)
    exact = ops.LocalPolynomial(near, far, DEGREE, local) if local else None
    copied = _in_rows if sizes.get("rows") else ops.LinearAttentionState.clone

    def step(state: ops.LinearAttentionState | ops.StateRows) -> Tensor:
        return ops.linear_attention_extend_(query, key, value, state, offset=1.0, local=exact, **options).output

    moved_on = copied(state)
    # Of a copy the same call gives the same, but copying takes longer than the step.
    return Call(lambda: step(copied(state)), [query, key, value], timed=lambda: step(moved_on))


def _sizes(width: int, *, features: int, local: int = 0, power: int = 2, factors: int = 1, **_: Any) -> str:
    """For a name."""
    exact = f", local {local}" if local else ""
    kind = "two factors" if factors == 2 else f"power {power}"
    return f"{kind}, {'r' if power == 2 else 'm'}={features}, h={width}{exact}"


OPS: dict[str, Callable[[], Iterator[Named]]] = {
    "linear": _linear_calls,
    "sketch": _sketch_calls,
    "low_rank": _low_rank_calls,
    "head_sketch": _head_sketch_calls,
    "convolution": _convolution_calls,
    "rotated_heads": _rotated_heads_calls,
    "gated_gelu": _gated_gelu_calls,
    "cross_entropy": _cross_entropy_calls,
    "polynomial": _polynomial_calls,
    "hyper": _hyper_calls,
    "window": _window_calls,
    "delta": _delta_calls,
    "decoding": _decoding_calls,
}
"""Calls of each op."""
