"""What the ways to attend are called, apart from what computes them: a wrong name is refused without PyTorch.

A mechanism is called `performer` or `performer:num_features=128,kind=relu`; two names stand for polysketch attention of
the sizes of a run: `learned` and `random`. A new mechanism needs no line here.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polysketch.attention import MECHANISMS, check_options

BASELINE = "sdpa"
"""What every other way is compared with: PyTorch's scaled_dot_product_attention."""

GIVEN = "given"
"""Features given: the op alone."""

ALL = "all"
"""Every mechanism of the library's table."""

FUSED = ("sdpa flash", "sdpa cudnn", "sdpa efficient")
"""The baseline by one of its fused kernels, not by PyTorch's choice."""

ALONE = (BASELINE, *FUSED, GIVEN)
"""What is no mechanism, and so no attention of a model."""

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


def check_names(names: Sequence[str], *besides: str) -> None:
    """Refuse what is neither a way nor among `besides`; the options of a mechanism are not looked at. Loads no PyTorch.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    for name in names:
        if name not in (*besides, *SKETCHES) and name.partition(":")[0] not in MECHANISMS:
            known = f"{BASELINE}, {GIVEN}, {', '.join(SKETCHES)}, or a mechanism: {', '.join(MECHANISMS)}"
            raise ValueError(f"unknown way to attend {name!r}; expected {known}")


def mechanism_of(name: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """The mechanism that a way is, and its options.

    Raises:
        ValueError: an unknown name or option; the message lists those that exist.
    """
    if name in SKETCHES:
        options = {"sketch_size": sizes.sketch_size, "local_chunk": sizes.local, "learned": SKETCHES[name][1]}
        return "polysketch-paper", options
    check_names([name])
    return parsed(name)


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
    check_options(name, options)
    return name, options


def arranged(name: str) -> tuple[str, int]:
    """A model's attention, and in every which layer it stands: `polysketch/4` is in every fourth, windows between.

    Raises:
        ValueError: no number of layers behind the last `/`.
    """
    way, slash, every = name.rpartition("/")
    if not slash:
        return name, 1
    if not every.isdecimal() or int(every) < 1:
        raise ValueError(f"expected MECHANISM/LAYERS, as in polysketch/4, found {name!r}")
    return way, int(every)


def attentions(names: Sequence[str]) -> tuple[str, ...]:
    """What attends in models so called, each once; windows too where they stand between.

    Raises:
        ValueError: as `arranged`.
    """
    found = [arranged(name) for name in names]
    windows = ["sliding-window"] if any(every > 1 for _, every in found) else []
    return tuple(dict.fromkeys([*(way for way, _ in found), *windows]))


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def with_baseline(names: Sequence[str], baseline: str = BASELINE) -> list[str]:
    """The baseline first, each once, with every mechanism of the library's table in the place of `all`."""
    every = [one for name in names for one in (MECHANISMS if name == ALL else [name])]
    return list(dict.fromkeys((baseline, *every)))
