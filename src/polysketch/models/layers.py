"""Which mechanism stands in which layer: names and options of every layer, from a name or a repeated pattern."""

from collections.abc import Mapping, Sequence
from typing import Any

from polysketch import attention
from polysketch.nn import check_mixer, mixer_class

WINDOW_BETWEEN = 256
"""Tokens of a window between layers whose mechanism says nothing of one: as many as `polysketch` has by default."""

WINDOWS = "sliding-window"


def layer_names(given: str | Sequence[str], num_layers: int) -> list[str]:
    """The mechanism of each layer.

    Args:
        given: one name for every layer, or a pattern of names that is repeated: as many as there are layers, or a
            number that divides the layers.
        num_layers: number of layers.

    Raises:
        TypeError: neither a text nor a list of texts.
        ValueError: a pattern that does not divide the layers.
    """
    return [given] * num_layers if isinstance(given, str) else _repeat("attention", given, str, num_layers)


def layer_options(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Sequence[str], *, by_name: bool
) -> list[dict[str, Any]]:
    """The options of each layer.

    Args:
        given: a dictionary, or a pattern of dictionaries that is repeated over the layers.
        names: the mechanism of each layer.
        by_name: a dictionary holds the options of each mechanism under its name, not options themselves.

    Raises:
        TypeError: no dictionary where there should be one.
        ValueError: a name that no layer has, or a pattern that does not divide the layers.
    """
    if not isinstance(given, Mapping):
        return [dict(item) for item in _repeat("attention_options", given, Mapping, len(names))]
    if not by_name:
        return [dict(given)] * len(names)
    _check_names(given, names)
    return [dict(given.get(name, {})) for name in names]


def windows_between(layers: Sequence[tuple[str, dict[str, Any]]], every: int) -> list[tuple[str, dict[str, Any]]]:
    """The layers as they are at every `every`-th, counted from the last, and windows of softmax in place of the others.

    Args:
        layers: mechanism and options of each; a window is as wide as the `window` of the one in its place, or has
            `WINDOW_BETWEEN` tokens.
        every: layers of a group.
    """
    return [
        (name, options)
        if (len(layers) - 1 - place) % every == 0
        else (WINDOWS, {"window": options.get("window", WINDOW_BETWEEN)})
        for place, (name, options) in enumerate(layers)
    ]


def check_layer(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be a layer of a causal language model.

    Raises:
        ValueError: an unknown mechanism or option, or a mechanism that cannot be causal; the message lists those that
            can be had.
    """
    if not mixer_class(name).is_causal:
        causal = ", ".join(attention.mechanisms_that("is_causal"))
        raise ValueError(
            f"attention mechanism {name!r} cannot be causal, and a language model must not see later tokens; "
            f"causal mechanisms: {causal}"
        )
    check_mixer(name, options)


def _repeat(field: str, given: Any, kind: type, num_layers: int) -> list[Any]:
    if not isinstance(given, list | tuple) or not all(isinstance(item, kind) for item in given):
        expected = "str" if kind is str else "dict"
        raise TypeError(f"{field} must be a {expected}, or a list of them to repeat over the layers, got {given!r}")
    if not given or num_layers % len(given):
        raise ValueError(
            f"{field} must be one, one per layer, or a pattern whose length divides the layers: "
            f"{num_layers} layers, got {len(given)}"
        )
    return list(given) * (num_layers // len(given))


def _check_names(given: Mapping[str, Any], names: Sequence[str]) -> None:
    known = list(dict.fromkeys(names))
    for name, options in given.items():
        if name not in known:
            raise ValueError(
                f"attention_options of several mechanisms go by name, {{{known[0]!r}: {{...}}}}, and no layer is "
                f"{name!r}; the layers are {', '.join(known)}"
            )
        if not isinstance(options, Mapping):
            raise TypeError(f"attention_options of {name!r} must be a dict, got {options!r}")
