"""Configurations that earlier versions saved, in the names of today. Loads no PyTorch.

In format 1 the paper's mechanism was called "polysketch", and the one of that name today "polysketch-delta". Presets
had no convolution of projections and no norm of queries and keys. Up to format 2 the sketches of today's "polysketch"
had 24 numbers each where nothing was said. Up to format 3 presets had no gates of heads.
"""

from collections.abc import Mapping
from typing import Any

FORMAT = 4
"""What saved configurations say under "format"."""

_NAMES = {"polysketch": "polysketch-paper", "polysketch-delta": "polysketch"}
_OPTIONS = {"polysketch": {"sketch_size": 24}}  # before _NEW_SKETCHES, where nothing was said
_NEW_SKETCHES = 3
_DEFAULTS: dict[str, Any] = {
    "projection_convolution": 0,
    "query_key_norm": False,
    "head_gate": False,
    "input_positions": True,
}


def check_format(written: Any, origin: str) -> None:
    """Refuse a configuration of a format that this version does not know.

    Raises:
        ValueError: `written` is not a whole number from 1 to `FORMAT`; `origin` tells where it stands.
    """
    if isinstance(written, bool) or not isinstance(written, int) or not 1 <= written <= FORMAT:
        raise ValueError(
            f"{origin}: expected a format from 1 to {FORMAT}, found {written!r}: altered by hand, or written by a "
            "newer version of polysketch, which reads it"
        )


def mechanism_of_format(written: int, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the options of today of a mechanism that format `written` called `name`."""
    today = _renamed(name) if written == 1 else name
    return today, _with_options(today, options) if written < _NEW_SKETCHES else dict(options)


def attention_of_format(written: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options that name mechanisms, as format `written` saved them, in the names of today.

    Args:
        written: the format.
        fields: plain data. `attention` and `rotary` may be names or patterns of names, `attention_options` those of a
            pattern; other fields stay as they are.

    Raises:
        ValueError: an earlier format, and no names or no options.
    """
    if written < _NEW_SKETCHES:
        _require_names(fields.get("attention"), fields.get("attention_options"))
    found = dict(fields)
    if written == 1:
        found |= {name: _renamed(fields[name]) for name in ("attention", "rotary") if name in fields}
    options = found.get("attention_options")
    if isinstance(options, Mapping) and isinstance(found.get("attention"), list | tuple) and written == 1:
        options = {_renamed(name): value for name, value in options.items()}
    if written < _NEW_SKETCHES and found.get("attention") is not None:
        options = _options_of(found["attention"], options or {})
    return found if options is None else {**found, "attention_options": options}


def model_of_format(written: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model as format `written` saved them, for today.

    What had another default is said: the attention where it is missing or None, and what stands around it.
    """
    if written > 1:
        return attention_of_format(written, fields)
    known = {name: value for name, value in fields.items() if value is not None}
    return {**fields, **attention_of_format(written, {"attention": "polysketch", **_DEFAULTS, **known})}


def training_of_format(written: int, training: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a training as format `written` saved them, for today.

    What was left to the preset, and has another default now, is as in its model: all of it in format 1, later the
    gates of heads.
    """
    left = [*_DEFAULTS] if written == 1 else ["head_gate"] * (written < FORMAT and training.get("head_gate") is None)
    around = {name: model.get(name, _DEFAULTS[name]) for name in left}
    return {**attention_of_format(written, training), **around}


def _require_names(attention: Any, options: Any) -> None:
    """Refuse what names no mechanisms, or gives no options of them; a file may say anything."""
    is_pattern = isinstance(attention, list | tuple)
    names = attention if is_pattern else [] if attention is None else [attention]
    groups = list(options.values()) if is_pattern and isinstance(options, Mapping) else []
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected the name of a mechanism, or a list of names, as attention, found {attention!r}")
    if not all(isinstance(each, Mapping) for each in [{} if options is None else options, *groups]):
        raise ValueError(f"expected options of mechanisms by name as attention_options, found {options!r}")


def _renamed(names: Any) -> Any:
    if isinstance(names, list | tuple):
        return [_renamed(name) for name in names]
    return _NAMES.get(names, names) if isinstance(names, str) else names


def _options_of(attention: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a name or a pattern, with the defaults of then."""
    if isinstance(attention, str):
        return _with_options(attention, options)
    missing = [name for name in dict.fromkeys(attention) if name in _OPTIONS]
    return {**options, **{name: _with_options(name, options.get(name, {})) for name in missing}}


def _with_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**_OPTIONS.get(name, {}), **options}
