"""Mechanisms of the library's table as prepared calls, each with its definition: a copy of it in float64.

Causal where the shape is and a mechanism can be.
"""

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polysketch import attention, ops
from polysketch.attention.beside_window import sketched_width
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


@dataclass
class Prepared:
    """A mechanism, calibrated where it can be, and random inputs of it.

    Attributes:
        module: the mechanism.
        tensors: query, key and value.
        hidden: what it reads besides; None where it does not.
        causal: whether tokens see those before them alone.
    """

    module: Any
    tensors: list[Tensor]
    hidden: Tensor | None
    causal: bool

    def exact(self) -> "Prepared":
        """The same in float64 on the CPU."""
        hidden = None if self.hidden is None else exact([self.hidden])[0]
        return Prepared(copy.deepcopy(self.module).cpu().double(), exact(self.tensors), hidden, self.causal)

    def call(self, backend: str | None = None) -> Call:
        """Forward; over features by the backend that is asked for, as `LinearizedAttention.forward` does it."""

        def attend() -> Tensor:
            return self.module(*self.tensors, causal=self.causal, hidden=self.hidden)

        def attend_over_features() -> Tensor:
            query, key, value = self.tensors
            (queries, keys), options = self.module.operands(query, key, value.dtype, self.hidden)
            return ops.linear_attention(
                queries, keys, value, causal=self.causal, backend=backend or "auto", **options
            ).output

        function = attend_over_features if backend and is_over_features(type(self.module)) else attend
        leaves = [*self.tensors, *([] if self.hidden is None else [self.hidden]), *self.module.parameters()]
        return Call(function, leaves, lambda: self.exact().call("reference"))

    def generation(self, spans: list[int]) -> Call:
        """Reading spans of tokens one after the other. No gradients."""

        def generate() -> Tensor:
            """The outputs of all spans, from an empty state on."""
            state, outputs, hidden = self.module.init_state(len(self.tensors[0])), [], [None] * len(spans)
            if self.hidden is not None:
                hidden = list(self.hidden.split(spans, dim=1))
            for *span, beside in zip(*(tensor.split(spans, dim=2) for tensor in self.tensors), hidden, strict=True):
                output, state = self.module.extend(*span, state, hidden=beside)
                outputs.append(output)
            return torch.cat(outputs, 2)

        return self.call()._replace(function=generate)


def prepared(name: str, options: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype) -> Prepared:
    """The mechanism with these options, and its inputs."""
    tensors, hidden = heads(shape, device, torch.float32), None
    if "hidden_size" in attention.option_names(name):
        options = {"hidden_size": shape.heads * shape.head_dim, **options}
    module: Any = attention.build(name, num_heads=shape.heads, head_dim=shape.head_dim, **options).to(device).eval()
    if module.reads_hidden:
        hidden = torch.randn(shape.batch, shape.length, options["hidden_size"], device=device)
    module.calibrate(*tensors[:2], hidden=hidden)
    hidden = None if hidden is None else hidden.to(dtype)
    causal = shape.causal and module.is_causal
    return Prepared(module.to(dtype), [tensor.to(dtype) for tensor in tensors], hidden, causal)


def prepare_generation(
    name: str, options: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype, *, local: int
) -> Call:
    """For a check, generating: a span read at once, then one chunk of `local` and a token one by one. No gradients."""
    options = checked_options(name, options, local)
    if "min_length" in options:  # hyper, whose decoding is exact, shall be exact all along
        options["min_length"] = shape.length
    spans = [shape.length - local - 1] + [1] * (local + 1)
    return prepared(name, options, shape, device, dtype).generation(spans)


def checked_options(name: str, options: dict[str, Any], local: int) -> dict[str, Any]:
    """The options with which each part of a mechanism carries weight in a sequence longer than two chunks.

    Args:
        name: of the mechanism.
        options: those that are asked for.
        local: tokens of a chunk or window at most.
    """
    usual = with_defaults(name, options)
    counted = {option: part for option, part in _NEARBY.items() if usual.get(option) is not None}
    options = {**options, **{option: min(usual[option], max(1, local // part)) for option, part in counted.items()}}
    gain = {"prefix_gain": _CHECKED_SHARE} if "prefix_gain" in usual and "local_chunk" in counted else {}
    return {**gain, **options}


def with_defaults(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every option of the mechanism: as it is given, or its default."""
    parameters = inspect.signature(attention.mechanism_class(name)).parameters
    return {option: parameters[option].default for option in attention.option_names(name)} | options


def floor(name: str, options: dict[str, Any], shape: Shape, *, backward: bool, itemsize: int) -> Floor | None:
    """Operations and bytes it cannot do without; None where they are not counted."""
    counted = _FLOORS.get(name)
    return counted and counted(shape, with_defaults(name, options), backward=backward, itemsize=itemsize)


def _polysketch(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor | None:
    """Of degree 4, without a gate or a Hadamard transform: other sketches have other networks."""
    if sizes["degree"] != 4 or sizes.get("decay_gate") or sizes["projection"] != "gaussian":
        return None
    local = sizes["local_chunk"] or 1
    networks = {"expansion": sizes["sketch_expansion"], "depth": sizes["sketch_depth"]}
    return floors.polysketch(shape, sizes["sketch_size"], local, learned=sizes["learned"], **networks, **counted)


def _polysketch_heavy(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor | None:
    """As `polysketch-paper`, and heavy entries."""
    sketched = _polysketch(shape, sizes, **counted)
    named = {name: sizes[name] for name in ("sketch_size", "heavy_size", "hash_bits")}
    heavy = floors.heavy_entries(shape, local=sizes["local_chunk"], backward=counted["backward"], **named)
    return sketched and sketched + heavy


def _polysketch_around_a_window(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    width = sketched_width(shape.head_dim, sizes["sketched"])
    named = {name: sizes[name] for name in ("sketch_size", "window")}
    return floors.delta_beside_window(shape, width=width, **named, **counted)


def _squared_polynomial(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    """Exact attention; in the linear form sums of all powers up to the degree, or of sketches of those from 2 on."""
    if not sizes["linear"]:
        return floors.exact_attention(shape, **counted)
    given, sketch_size, width = sizes["coefficients"], sizes["sketch_size"], shape.head_dim
    degree = given if isinstance(given, int) else len(given) - 1
    if sketch_size is None or degree == 1:
        return floors.linearised(shape, floors.squares(math.comb(width + degree, degree)), mapped=0, **counted)
    features = 1 + width + (degree - 1) * sketch_size
    return floors.linearised(shape, floors.squares(features), mapped=degree * width * sketch_size, **counted)


def _hyper(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor | None:
    """Of uniform draws without bounds, as in the paper's experiments."""
    if sizes["sampling"] != "uniform" or sizes["capping"] is not None:
        return None
    named = {name: sizes[name] for name in ("chunk_size", "sample_size", "min_length", "hash_bits")}
    return floors.hyper_attention(shape, **named, **counted)


def _llops(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    features = sizes["num_features"]
    mapped = sizes["rank"] * sizes["degree"] * shape.head_dim * features
    return floors.linearised(shape, features, mapped=mapped, normalized=sizes["normalize"], **counted)


def _performer(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    features = sizes["num_features"]
    local = sizes["local_chunk"] or 0
    return floors.linearised(shape, features, mapped=shape.head_dim * features, local=local, **counted)


def _based(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    """One, a projection, and its products of two."""
    width = sizes["feature_dim"]
    return floors.linearised(shape, 1 + width + floors.squares(width), mapped=shape.head_dim * width, **counted)


_FLOORS: dict[str, Callable[..., Floor | None]] = {
    "softmax": lambda shape, sizes, **counted: floors.exact_attention(shape, **counted),
    "polynomial": lambda shape, sizes, **counted: floors.exact_attention(shape, **counted),
    "squared-polynomial": _squared_polynomial,
    "polysketch-paper": _polysketch,
    "polysketch-heavy": _polysketch_heavy,
    "polysketch": _polysketch_around_a_window,
    "llops": _llops,
    "hyper": _hyper,
    "local": lambda shape, sizes, **counted: floors.nearby_attention(shape, sizes["local_chunk"] / 2, **counted),
    "sliding-window": lambda shape, sizes, **counted: floors.nearby_attention(shape, sizes["window"], **counted),
    "based": _based,
    "linear": lambda shape, sizes, **counted: floors.linearised(shape, shape.head_dim, mapped=0, **counted),
    "performer": _performer,
}
"""How the products of a mechanism are counted, by name; one that is missing has no floor in tables and plots."""
