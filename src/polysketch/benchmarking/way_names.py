"""What the ways to attend are called, apart from what computes them: a wrong name is refused without PyTorch.

A mechanism is called `performer` or `performer:num_features=128,kind=relu`; two names stand for polysketch attention of
the sizes of a run: `learned` and `random`. A new mechanism needs no line here.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polysketch.attention import MECHANISMS, check_options
from polysketch.attention.registry import check_name

BASELINE = "sdpa"
"""What every other way is compared with: PyTorch's scaled_dot_product_attention."""

GIVEN = "given"
"""Features given: the op alone."""

ALL = "all"
"""Every mechanism of the library's table."""

FUSED = ("sdpa flash", "sdpa cudnn", "sdpa efficient")
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


def mechanism_of(name: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """The mechanism that a way is, and its options.

    Raises:
        ValueError: an unknown name or option; the message lists those that exist.
    """
    if name in SKETCHES:
        options = {"sketch_size": sizes.sketch_size, "local_chunk": sizes.local, "learned": SKETCHES[name][1]}
        return "polysketch-paper", options
    check_model(name)
    return parsed(name)


def check_way(name: str) -> None:
    """Refuse what `ways.way` does not know; of a mechanism with options its name alone is looked at. Loads no PyTorch.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    if name not in (BASELINE, GIVEN, *FUSED):
        check_model(name)


def check_model(name: str) -> None:
    """As `check_way`, for the attention of a whole model.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    if name not in SKETCHES and _mechanism(name) not in MECHANISMS:
        known = f"{BASELINE}, {GIVEN}, {', '.join(SKETCHES)}, or a mechanism: {', '.join(MECHANISMS)}"
        raise ValueError(f"unknown way to attend {name!r}; expected {known}")


def expanded(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts, each once, with all names of the library's table in the place of `all`.

    Raises:
        ValueError: an unknown mechanism or option, or something that is not name:option=value.
    """
    names = [name for text in texts for name in (MECHANISMS if text == ALL else [text])]
    for name in names:
        check_name(_mechanism(name))  # of all, before the options of one load PyTorch
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
    check_options(name, options)
    return name, options


def _mechanism(text: str) -> str:
    return text.partition(":")[0]


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
