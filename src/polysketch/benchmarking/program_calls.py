"""Calls of the public ops that launch Triton programs, at the shapes that matter: to be compiled, tuned, checked.

The same calls on every device: on "meta" they are compiled, on CUDA they run. Programs do not depend on lengths.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.benchmarking import calls
from polysketch.benchmarking.calls import Call
from polysketch.feature_maps import LearnedSketch
from polysketch.feature_maps.learned_sketch import SketchNetwork
from polysketch.ops.learned_sketch import learned_sketch

__all__ = ["DTYPES", "OPS", "ProgramCall", "most_common_first", "program_calls"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LOCAL = 256
_DEGREE = 4
_COMMON = {
    *(f"linear power 2, r={size}, h=64, local {_LOCAL}" for size in (32, 64, 128)),
    *(f"linear power 2, r=32, h={width}" for width in (64, 128)),
    "linear power 1, m=64, h=64",
    "linear two factors, m=48, h=64",
    "linear power 1, m=256, h=128, local 256",
    "linear power 2, r=32, h=64, local 256, decay, 2 queries a key",
    "sketch r=32, h=64",
    "sketch r=64, h=128",
    "polynomial h=64",
    "polynomial h=128",
    "delta two factors, m=48, h=64",
    "delta two factors, m=48, h=65",
    "delta power 1, m=64, h=64",
    "decoding power 2, r=32, h=64, local 256",
    "decoding power 1, m=64, h=64",
    "decoding two factors, m=48, h=64",
}


@dataclass(frozen=True)
class ProgramCall:
    """A call of one op.

    Attributes:
        name: says op, widths and options.
        op: linear, sketch, polynomial, delta or decoding.
        dtype: name of the inputs' dtype.
        build: (device, batch, heads, length) -> the call; random inputs.
        differentiable: whether it has a backward pass.
    """

    name: str
    op: str
    dtype: str
    build: Callable[[torch.device, int, int, int], Call]
    differentiable: bool = True

    def passes(self, call: Call) -> Callable[[], Any]:
        """The call that was built, forward and, where there is one, backward."""
        return calls.forward_backward(call) if self.differentiable else calls.forward(call)


def program_calls(ops_wanted: Sequence[str] = (), dtypes: Sequence[str] = tuple(DTYPES)) -> list[ProgramCall]:
    """Calls of some ops of `OPS`, or of all, in some of `DTYPES`: in bfloat16 all sizes, else the common ones."""
    made = itertools.chain.from_iterable(OPS[op](dtype) for op in ops_wanted or OPS for dtype in dtypes)
    return [call for call in made if call.dtype == "bfloat16" or call.name in _COMMON]


def most_common_first(made: list[ProgramCall]) -> list[ProgramCall]:
    """The first call of every op and dtype, then the second ones, and so on."""
    groups: dict[tuple[str, str], list[ProgramCall]] = {}
    for call in made:
        groups.setdefault((call.op, call.dtype), []).append(call)
    turns = itertools.zip_longest(*groups.values())
    return [call for turn in turns for call in turn if call is not None]


def _linear_calls(dtype: str) -> Iterator[ProgramCall]:
    """Power 2 by sketch size, head size and local part; power 1 by features; two factors; and every option once."""
    for sketch_size, width, local in itertools.product((32, 64, 16, 128), (64, 128), (_LOCAL, 0)):
        yield _linear(dtype, features=sketch_size, width=width, local=local)
    for features, width, local in itertools.product((64, 256), (64, 128), (_LOCAL, 0)):
        yield _linear(dtype, features=features, width=width, local=local, power=1)
    for power, local in itertools.product((2, 1), (_LOCAL, 0)):
        features = 32 if power == 2 else 64
        yield _linear(dtype, features=features, local=local, power=power, decays=True, shared=2)
    for width, decays in itertools.product((64, 128), (False, True)):
        yield _linear(dtype, features=48, width=width, local=0, power=1, factors=2, decays=decays)
    yield _linear(dtype, features=32, local=0, causal=False)
    yield _linear(dtype, features=64, local=0, power=1, causal=False)


def _linear(
    dtype: str,
    *,
    features: int,
    width: int = 64,
    local: int = _LOCAL,
    power: int = 2,
    factors: int = 1,
    causal: bool = True,
    decays: bool = False,
    shared: int = 1,
) -> ProgramCall:
    flags = {"decay": decays, "not causal": not causal, f"{shared} queries a key": shared > 1}
    name = ", ".join(
        [_sizes(power, factors, features, width, local), *(flag for flag, is_set in flags.items() if is_set)]
    )

    def build(device: torch.device, batch: int, heads: int, length: int) -> Call:
        make, key_heads = partial(_random, device, DTYPES[dtype], batch), heads // shared
        query, key = make(heads, length, features).abs(), make(key_heads, length, features).abs()
        value = make(key_heads, length, width)
        near = [make(heads, length, width), make(key_heads, length, width) / width**0.5] if local else []
        decay = [-0.01 * make(key_heads, length).abs()] if decays else []
        options: dict[str, Any] = {"power": power, "factors": factors, "causal": causal, "offset": 1.0}

        def attend() -> Tensor:
            exact = ops.LocalPolynomial(near[0], near[1], _DEGREE, local) if near else None
            log_decay = decay[0] if decay else None
            return ops.linear_attention(
                query, key, value, local=exact, log_decay=log_decay, backend="triton", **options
            ).output

        return Call(attend, [query, key, value, *near, *decay])

    return ProgramCall(f"linear {name}", "linear", dtype, build)


def _sketch_calls(dtype: str) -> Iterator[ProgramCall]:
    for sketch_size, width in itertools.product((32, 64), (64, 128)):
        yield ProgramCall(
            f"sketch r={sketch_size}, h={width}", "sketch", dtype, partial(_sketch, dtype, sketch_size, width)
        )


def _sketch(
    dtype: str, sketch_size: int, width: int, device: torch.device, batch: int, heads: int, length: int
) -> Call:
    module = LearnedSketch(width, sketch_size=sketch_size).to(device, DTYPES[dtype])
    weights = [weight for network in module.networks for weight in cast(SketchNetwork, network).weights()]
    x = _random(device, DTYPES[dtype], batch, heads, length, width)
    return Call(lambda: learned_sketch(x, weights, 2, backend="triton"), [x, *weights])


def _polynomial_calls(dtype: str) -> Iterator[ProgramCall]:
    for width, causal in itertools.product((64, 128), (True, False)):
        name = f"polynomial h={width}{'' if causal else ', not causal'}"
        yield ProgramCall(name, "polynomial", dtype, partial(_polynomial, dtype, width, causal))


def _polynomial(
    dtype: str, width: int, causal: bool, device: torch.device, batch: int, heads: int, length: int
) -> Call:
    tensors = [_random(device, DTYPES[dtype], batch, heads, length, width) / width**0.25 for _ in range(3)]
    return Call(lambda: ops.polynomial_attention(*tensors, degree=_DEGREE, causal=causal, backend="triton"), tensors)


def _delta_calls(dtype: str) -> Iterator[ProgramCall]:
    """Values as wide as heads, and with the one behind them that mechanisms ask for."""
    for features, width, factors in ((48, 64, 2), (48, 65, 2), (64, 64, 1), (32, 65, 2), (64, 129, 2)):
        yield _delta(dtype, features, width, factors)


def _delta(dtype: str, features: int, width: int, factors: int) -> ProgramCall:
    def build(device: torch.device, batch: int, heads: int, length: int) -> Call:
        make = partial(_random, device, DTYPES[dtype], batch, heads, length)
        parts = make(features).unflatten(-1, (factors, -1))
        key, value, strength = F.normalize(parts, dim=-1).flatten(-2), make(width), make().sigmoid()
        return Call(
            lambda: ops.delta_writes(key, value, strength, factors=factors, backend="triton"), [key, value, strength]
        )

    return ProgramCall(f"delta {_sizes(1, factors, features, width, 0)}", "delta", dtype, build)


def _decoding_calls(dtype: str) -> Iterator[ProgramCall]:
    for features, width, local in itertools.product((32, 64), (64, 128), (_LOCAL, 0)):
        yield _decoding(dtype, features, width, local, power=2)
    yield _decoding(dtype, 64, 64, 0, power=1)
    yield _decoding(dtype, 48, 64, 0, power=1, factors=2)


def _decoding(dtype: str, features: int, width: int, local: int, *, power: int, factors: int = 1) -> ProgramCall:
    def build(device: torch.device, batch: int, heads: int, length: int) -> Call:
        make = partial(_random, device, DTYPES[dtype], batch, heads, 1)
        query, key, value, near, far = make(features), make(features), make(width), make(width), make(width)
        options: dict[str, Any] = {"power": power, "factors": factors}
        sizes: dict[str, Any] = {"local_chunk": local, "local_dim": width if local else 0}
        state = ops.LinearAttentionState.init(batch, heads, features, width, device=device, **options, **sizes)
        state.move_to_(length + local // 2)
        exact = ops.LocalPolynomial(near, far, _DEGREE, local) if local else None

        def step(state: ops.LinearAttentionState) -> Tensor:
            result = ops.linear_attention_extend_(query, key, value, state, offset=1.0, local=exact, **options)
            return result.output

        moved_on = state.clone()
        # Of a copy the same call gives the same, but copying takes longer than the step.
        return Call(lambda: step(state.clone()), [query, key, value], timed=lambda: step(moved_on))

    return ProgramCall(
        f"decoding {_sizes(power, factors, features, width, local)}", "decoding", dtype, build, differentiable=False
    )


def _sizes(power: int, factors: int, features: int, width: int, local: int) -> str:
    """For a name."""
    exact = f", local {local}" if local else ""
    kind = "two factors" if factors == 2 else f"power {power}"
    return f"{kind}, {'r' if power == 2 else 'm'}={features}, h={width}{exact}"


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


OPS: dict[str, Callable[[str], Iterator[ProgramCall]]] = {
    "linear": _linear_calls,
    "sketch": _sketch_calls,
    "polynomial": _polynomial_calls,
    "delta": _delta_calls,
    "decoding": _decoding_calls,
}
"""Calls of each op, in a dtype."""
