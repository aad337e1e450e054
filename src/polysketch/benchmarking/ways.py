"""The ways to attend that are timed, by name: `sdpa`, `given`, and every mechanism of the library's table.

A mechanism is called `performer` or `performer:num_features=128,kind=relu`; two names stand for polysketch attention of
the sizes of a run: `learned` and `random`. A new mechanism needs no line here.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from polysketch import attention
from polysketch.benchmarking import calls, floors, mechanisms
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape

BASELINE = "sdpa"
"""What every other way is compared with: PyTorch's scaled_dot_product_attention."""

ALL = "all"
FUSED = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The baseline by one of its fused kernels, not by PyTorch's choice."""

SKETCHES = {"learned": ("learned sketch", True), "random": ("random sketch", False)}
"""Name -> title, and whether the sketch is learned: polysketch attention of a run's sketch size and local chunk."""

_WORDS = {"none": None, "true": True, "false": False}


@dataclass(frozen=True)
class Sizes:
    """What an attention call has besides its shape, where a way leaves it open.

    Attributes:
        sketch_size: number of features.
        local: tokens of an exact chunk; in checks of any mechanism the most tokens of a chunk or window.
        backend: of `linear_attention` with features given; whole mechanisms choose their own ("auto").
    """

    sketch_size: int = 32
    local: int = 256
    backend: str = "auto"


@dataclass(frozen=True)
class Way:
    """One way to attend.

    Attributes:
        title: in tables and plots.
        prepare: (shape, device, dtype) -> Call with random inputs.
        floor: (shape, backward=, itemsize=) -> Floor, or None where it is not counted.
        prepare_check: (shape, device, dtype, backend=) -> Call to be compared with its definition, by a backend of
            `linear_attention` where there is one to choose; None where the result is not ours.
        linear: whether it runs `linear_attention`, by any backend.
    """

    title: str
    prepare: Callable[[Shape, torch.device, torch.dtype], Call]
    floor: Callable[..., Floor | None]
    prepare_check: Callable[..., Call] | None = None
    linear: bool = False


def way(name: str, sizes: Sizes) -> Way:
    """The way called `name`.

    Raises:
        ValueError: an unknown name or option; the message lists those that exist.
    """
    if name == BASELINE or name in FUSED:
        return Way(name, partial(calls.sdpa, backend=FUSED.get(name)), floors.exact_attention)
    if name == "given":
        given: dict[str, Any] = {"sketch_size": sizes.sketch_size, "local": sizes.local}
        make, floor = partial(calls.linear, **given), partial(floors.linear_attention, **given)
        return Way("features given", partial(make, backend=sizes.backend), floor, make, linear=True)
    mechanism, options = mechanism_of(name, sizes)
    kind = attention.mechanism_class(mechanism)
    title = SKETCHES[name][0] if name in SKETCHES else name
    checked = mechanisms.checked_options(mechanism, options, sizes.local)
    return Way(
        title if kind.is_causal else f"{title} (bidirectional)",
        lambda *where: mechanisms.prepared(mechanism, options, *where).call(),
        partial(mechanisms.floor, mechanism, options),
        lambda *where, backend="auto": mechanisms.prepared(mechanism, checked, *where).call(backend),
        mechanisms.is_over_features(kind),
    )


def mechanism_of(name: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """The mechanism that a way is, and its options.

    Raises:
        ValueError: an unknown name or option; the message lists those that exist.
    """
    if name in SKETCHES:
        options = {"sketch_size": sizes.sketch_size, "local_chunk": sizes.local, "learned": SKETCHES[name][1]}
        return "polysketch", options
    if name.partition(":")[0] not in attention.MECHANISMS:
        known = f"{BASELINE}, given, {', '.join(SKETCHES)}, or a mechanism: {', '.join(attention.MECHANISMS)}"
        raise ValueError(f"unknown way to attend {name!r}; expected {known}")
    return parsed(name)


def expanded(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts, each once, with all names of the library's table in the place of `all`.

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


def with_baseline(names: Sequence[str], baseline: str = BASELINE) -> list[str]:
    """The baseline first, each once."""
    return list(dict.fromkeys((baseline, *names)))
