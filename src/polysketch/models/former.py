"""Configurations that earlier versions saved, in the names of today. Loads no PyTorch.

In format 1 the paper's mechanism was called "polysketch", and the one of that name today "polysketch-delta". Presets
had no convolution of projections and no norm of queries and keys.
"""

from collections.abc import Mapping
from typing import Any

FORMAT = 2
"""What saved configurations say under "format"."""

_NAMES = {"polysketch": "polysketch-paper", "polysketch-delta": "polysketch"}
_DEFAULTS: dict[str, Any] = {
    "projection_convolution": 0,
    "query_key_norm": False,
    "head_gate": False,
    "input_positions": True,
}


def mechanism_of_format_1(name: str) -> str:
    """The name of today of the mechanism that format 1 called `name`."""
    return _NAMES.get(name, name)


def attention_of_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options that name mechanisms, as format 1 saved them, in the names of today.

    Args:
        fields: plain data. `attention` and `rotary` may be names or patterns of names, `attention_options` those of a
            pattern; other fields stay as they are.
    """
    found, options = dict(fields), fields.get("attention_options")
    for name in ("attention", "rotary"):
        if name in fields:
            found[name] = _renamed(fields[name])
    if isinstance(options, Mapping) and isinstance(fields.get("attention"), list | tuple):
        found["attention_options"] = {mechanism_of_format_1(name): value for name, value in options.items()}
    return found


def model_of_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model as format 1 saved them, for today.

    What had another default is said: the attention where it is missing or None, and what stands around it.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    return {**fields, **attention_of_format_1({"attention": "polysketch", **_DEFAULTS, **known})}


def training_of_format_1(training: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a training as format 1 saved them, for today: what they left to the preset is as in its model."""
    return {**attention_of_format_1(training), **{name: model.get(name, was) for name, was in _DEFAULTS.items()}}


def _renamed(names: Any) -> Any:
    if isinstance(names, list | tuple):
        return [_renamed(name) for name in names]
    return mechanism_of_format_1(names) if isinstance(names, str) else names
