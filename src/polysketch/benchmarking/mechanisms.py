"""Mechanisms of the library's table as prepared calls, each with its definition: a copy of it in float64.

Causal where a mechanism can be.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polysketch import attention, ops
from polysketch.attention.linearized import LinearizedAttention
from polysketch.benchmarking import floors
from polysketch.benchmarking.calls import Call, exact, heads
from polysketch.benchmarking.floors import Floor, Shape

_CHECKED_SHARE = 0.5  # of the attention mass: the sketched part's in a check, where there is a gain to set it by
_NEARBY = {"local_chunk": 1, "window": 1, "min_length": 1, "chunk_size": 8, "sample_size": 8}
"""Options that count tokens: in a check at most the local chunk, or so small a part of it."""


def is_over_features(kind: type) -> bool:
    """Whether it is a feature map and `linear_attention`, so that any backend of the latter can be asked for."""
    return issubclass(kind, LinearizedAttention) and kind.forward is LinearizedAttention.forward


def prepare(name: str, options: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """The mechanism of random queries, keys and values."""
    return _call(*_made(name, options, shape, device, dtype), backend=None)


def prepare_check(
    name: str,
    options: dict[str, Any],
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    local: int,
    backend: str = "auto",
) -> Call:
    """The mechanism for a check at a small length: each of its parts carries weight there.

    Args:
        name, options: of the mechanism.
        shape, device, dtype: of the inputs; longer than two chunks of `local`.
        local: tokens of a chunk or window at most.
        backend: of `linear_attention`, where the mechanism is over features.
    """
    return _call(*_made(name, checked_options(name, options, local), shape, device, dtype), backend=backend)


def prepare_generation(
    name: str, options: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype, *, local: int
) -> Call:
    """As `prepare_check`, generating: a span read at once, then one chunk and a token one by one. No gradients."""
    options = checked_options(name, options, local)
    if "min_length" in options:  # hyper, whose decoding is exact, shall be exact all along
        options["min_length"] = shape.length
    module, tensors, given = _made(name, options, shape, device, dtype)
    spans = [shape.length - local - 1] + [1] * (local + 1)

    def generate() -> Tensor:
        state, outputs = module.init_state(shape.batch), []
        for *span, hidden in zip(*_split(tensors, spans), *_split_hidden(given, spans), strict=True):
            output, state = module.extend(*span, state, hidden=hidden)
            outputs.append(output)
        return torch.cat(outputs, 2)

    return Call(generate, [*tensors, *module.parameters()], lambda: _definition(module, tensors, given))


def _split(tensors: Sequence[Tensor], spans: list[int]) -> list[tuple[Tensor, ...]]:
    return [tensor.split(spans, dim=2) for tensor in tensors]


def _split_hidden(given: dict[str, Tensor], spans: list[int]) -> list[Sequence[Tensor | None]]:
    return [given["hidden"].split(spans, dim=1) if given else [None] * len(spans)]


def checked_options(name: str, options: dict[str, Any], local: int) -> dict[str, Any]:
    """The options with which each part of a mechanism carries weight in a sequence longer than two chunks.

    Args:
        name: of the mechanism.
        options: those that are asked for.
        local: tokens of a chunk or window at most.
    """
    parameters = inspect.signature(attention.mechanism_class(name)).parameters
    usual = {option: options.get(option, one.default) for option, one in parameters.items()}
    counted = {option: part for option, part in _NEARBY.items() if usual.get(option) is not None}
    options = {**options, **{option: min(usual[option], max(1, local // part)) for option, part in counted.items()}}
    gain = {"prefix_gain": _CHECKED_SHARE} if "prefix_gain" in parameters and "local_chunk" in counted else {}
    return {**gain, **options}


def _made(
    name: str, options: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
    """The module, calibrated where it can be; query, key and value; and what it takes besides."""
    tensors = heads(shape, device, torch.float32)
    given: dict[str, Tensor] = {}
    if "hidden_size" in attention.option_names(name):
        options = {"hidden_size": shape.heads * shape.head_dim, **options}
    module: Any = attention.build(name, num_heads=shape.heads, head_dim=shape.head_dim, **options).to(device).eval()
    if module.reads_hidden:
        given["hidden"] = torch.randn(shape.batch, shape.length, options["hidden_size"], device=device)
    module.calibrate(*tensors[:2], **given)
    given = {part: tensor.to(dtype) for part, tensor in given.items()}
    return module.to(dtype), [tensor.to(dtype) for tensor in tensors], given


def _call(module: Any, tensors: list[Tensor], given: dict[str, Tensor], *, backend: str | None) -> Call:
    """The call; over features by the backend that is asked for, as `LinearizedAttention.forward` does it."""

    def attend() -> Tensor:
        return module(*tensors, causal=module.is_causal, **given)

    def attend_over_features() -> Tensor:
        query, key, value = tensors
        (queries, keys), options = module.operands(query, key, value.dtype, given.get("hidden"))
        return ops.linear_attention(queries, keys, value, causal=True, backend=backend or "auto", **options).output

    function: Callable[[], Tensor] = attend_over_features if backend and is_over_features(type(module)) else attend
    leaves = [*tensors, *given.values(), *module.parameters()]
    return Call(function, leaves, lambda: _definition(module, tensors, given))


def _definition(module: Any, tensors: list[Tensor], given: dict[str, Tensor]) -> Call:
    """A copy in float64 on the CPU, over features with the reference of the op."""
    exact_given = dict(zip(given, exact(given.values()), strict=True))
    return _call(copy.deepcopy(module).cpu().double(), exact(tensors), exact_given, backend="reference")


def floor(name: str, options: dict[str, Any], shape: Shape, *, backward: bool, itemsize: int) -> Floor | None:
    """Operations and bytes it cannot do without; None where they are not counted."""
    if name not in _FLOORS:
        return None
    parameters = inspect.signature(attention.mechanism_class(name)).parameters
    sizes = {option: one.default for option, one in parameters.items()} | options
    return _FLOORS[name](shape, sizes, backward=backward, itemsize=itemsize)


def _polysketch(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor | None:
    """Of degree 4 without a gate: other sketches have other networks."""
    if sizes["degree"] != 4 or sizes["decay_gate"]:
        return None
    local = sizes["local_chunk"] or 1
    return floors.polysketch(shape, sizes["sketch_size"], local, learned=sizes["learned"], **counted)


_FLOORS: dict[str, Callable[..., Floor | None]] = {
    "softmax": lambda shape, sizes, **counted: floors.exact_attention(shape, **counted),
    "polynomial": lambda shape, sizes, **counted: floors.exact_attention(shape, **counted),
    "polysketch": _polysketch,
    "local": lambda shape, sizes, **counted: floors.nearby_attention(shape, sizes["local_chunk"] / 2, **counted),
    "sliding-window": lambda shape, sizes, **counted: floors.nearby_attention(shape, sizes["window"], **counted),
}
"""How the products of a mechanism are counted, by name; one that is missing has no floor in tables and plots."""
