"""Mechanisms of the library's table as prepared calls, by name: `performer`, or `performer:num_features=128,kind=relu`.

Causal where a mechanism can be, with its default options where none are given.
"""

import ast
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polysketch import attention, ops
from polysketch.attention.linearized import LinearizedAttention
from polysketch.benchmarking import floors
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape

ALL = "all"
_WORDS = {"none": None, "true": True, "false": False}
_CHECKED_SHARE = 0.5  # of the attention mass: the sketched part's in a check, where there is a gain to set it by
_NEARBY = {"local_chunk": 1, "window": 1, "min_length": 1, "chunk_size": 8, "sample_size": 8}
"""Options that count tokens: in a check at most the local chunk, or so small a part of it."""


def expanded(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts, each once, with all names of the table in the place of `all`.

    Raises:
        ValueError: an unknown mechanism or option, or something that is not name:option=value.
    """
    names = [name for text in texts for name in (attention.MECHANISMS if text == ALL else [text])]
    for name in names:
        parsed(name)
    return tuple(dict.fromkeys(names))


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name:option=value,option=value`; values are numbers, none, true, false or words.

    Raises:
        ValueError: an unknown mechanism or option, or a part without `=`.
    """
    name, _, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    for option, equals, _ in pairs:
        if not equals:
            raise ValueError(f"expected mechanism:option=value,option=value, found {option!r} in {text!r}")
    options = {option: _value(given) for option, _, given in pairs}
    attention.check_options(name, options)
    return name, options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def is_causal(text: str) -> bool:
    """Whether it can be causal, and so is timed causally."""
    return attention.mechanism_class(parsed(text)[0]).is_causal


def is_over_features(text: str) -> bool:
    """Whether it is a feature map and `linear_attention`, so that any backend of the latter can be asked for."""
    return _is_plain(attention.mechanism_class(parsed(text)[0]))


def prepare(text: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """The mechanism of random queries, keys and values."""
    name, options = parsed(text)
    return _prepare(name, options, shape, device, dtype, backend=None)


def prepare_check(
    text: str, shape: Shape, device: torch.device, dtype: torch.dtype, *, local: int, backend: str
) -> Call:
    """The mechanism for a check at a small length: each of its parts carries weight there.

    Args:
        text: as for `parsed`.
        shape: longer than two chunks of `local`.
        local: tokens of a chunk or window at most.
        backend: of `linear_attention`, where the mechanism is over features.
    """
    name, options = parsed(text)
    return _prepare(name, checked_options(name, options, local), shape, device, dtype, backend=backend)


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


def _prepare(
    name: str,
    options: dict[str, Any],
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backend: str | None,
) -> Call:
    tensors = [torch.randn(shape.batch, shape.heads, shape.length, shape.head_dim, device=device) for _ in range(3)]
    given: dict[str, Tensor] = {}
    if "hidden_size" in attention.option_names(name):
        options = {"hidden_size": shape.heads * shape.head_dim, **options}
    module: Any = attention.build(name, num_heads=shape.heads, head_dim=shape.head_dim, **options).to(device).eval()
    if module.reads_hidden:
        given["hidden"] = torch.randn(shape.batch, shape.length, options["hidden_size"], device=device)
    if hasattr(module, "calibrate"):
        module.calibrate(*tensors[:2], **given)
    given = {part: tensor.to(dtype) for part, tensor in given.items()}
    return _call(module.to(dtype), [tensor.to(dtype) for tensor in tensors], given, backend)


def _call(module: Any, tensors: list[Tensor], given: dict[str, Tensor], backend: str | None) -> Call:
    """The call; its definition is a copy in float64, over features with the reference of the op."""
    over_features = backend is not None and _is_plain(type(module))
    attend = (
        _attend_over_features(module, tensors, given, backend) if over_features else _attend(module, tensors, given)
    )
    leaves = [*tensors, *given.values(), *module.parameters()]
    return Call(attend, leaves, lambda: _definition(module, tensors, given))


def _attend(module: Any, tensors: list[Tensor], given: dict[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: module(*tensors, causal=module.is_causal, **given)


def _attend_over_features(
    module: Any, tensors: list[Tensor], given: dict[str, Tensor], backend: str | None
) -> Callable[[], Tensor]:
    """What `LinearizedAttention.forward` does, with a backend of one's choice."""
    query, key, value = tensors

    def attend() -> Tensor:
        (queries, keys), options = module.operands(query, key, value.dtype, given.get("hidden"))
        return ops.linear_attention(queries, keys, value, causal=True, backend=backend or "auto", **options).output

    return attend


def _definition(module: Any, tensors: list[Tensor], given: dict[str, Tensor]) -> Call:
    exact = copy.deepcopy(module).cpu().double()
    exact_tensors = [tensor.detach().cpu().double() for tensor in tensors]
    exact_given = {name: tensor.detach().cpu().double() for name, tensor in given.items()}
    return _call(exact, exact_tensors, exact_given, "reference")


def _is_plain(kind: type) -> bool:
    return issubclass(kind, LinearizedAttention) and kind.forward is LinearizedAttention.forward


def floor(text: str, shape: Shape, *, backward: bool, itemsize: int) -> Floor | None:
    """Operations and bytes it cannot do without; None where they are not counted."""
    name, options = parsed(text)
    if name not in _FLOORS:
        return None
    parameters = inspect.signature(attention.mechanism_class(name)).parameters
    sizes = {option: one.default for option, one in parameters.items()} | options
    return _FLOORS[name](shape, sizes, backward=backward, itemsize=itemsize)


def _exact(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    return floors.exact_attention(shape, **counted)


def _polysketch(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor | None:
    """Of degree 4 without a gate: other sketches have other networks."""
    if sizes["degree"] != 4 or sizes["decay_gate"]:
        return None
    local = sizes["local_chunk"] or 1
    return floors.polysketch(shape, sizes["sketch_size"], local, learned=sizes["learned"], **counted)


def _local(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    return floors.nearby_attention(shape, sizes["local_chunk"] / 2, **counted)


def _window(shape: Shape, sizes: dict[str, Any], **counted: Any) -> Floor:
    return floors.nearby_attention(shape, sizes["window"], **counted)


_FLOORS: dict[str, Callable[..., Floor | None]] = {
    "softmax": _exact,
    "polynomial": _exact,
    "polysketch": _polysketch,
    "local": _local,
    "sliding-window": _window,
}
"""How the products of a mechanism are counted, by name; one that is missing has no floor in tables and plots."""
