"""`key=value` pairs of the command line, typed by the constructor of the mechanism they are for."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

_SHAPE_ARGUMENTS = {"self", "num_heads", "head_dim", "num_kv_heads", "hidden_size"}
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def parse_attention_options(pairs: Sequence[str], mechanism: Callable[..., Any], name: str) -> dict[str, Any]:
    """Turn `key=value` texts into the typed options of a mechanism.

    Args:
        pairs: for instance `("sketch_size=32", "local_chunk=none")`.
        mechanism: the mechanism's class, whose constructor's annotations give the types.
        name: the mechanism's name, for messages.

    Returns:
        Options by name, in the order given.

    Raises:
        ValueError: a text without `=`, an unknown or repeated option, or a value of another type.
    """
    annotations = _option_annotations(mechanism)
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--attention-options: expected key=value, found {pair!r}")
        if key not in annotations:
            known = ", ".join(annotations) or "none"
            raise ValueError(f"--attention-options: {name} has no option {key!r}; its options are: {known}")
        if key in options:
            raise ValueError(f"--attention-options: {key} is given twice")
        options[key] = _parse(text, annotations[key], f"--attention-options {key}")
    return options


def parse_options_by_name(
    pairs: Sequence[str], mechanisms: Mapping[str, Callable[..., Any]]
) -> dict[str, dict[str, Any]]:
    """Turn `name.key=value` texts into the typed options of each of several mechanisms.

    Args:
        pairs: for instance `("polysketch.sketch_size=32", "sliding-window.window=64")`.
        mechanisms: the class of each mechanism by its name.

    Returns:
        Options by name of the mechanism; a mechanism without options is left out.

    Raises:
        ValueError: a text that names none of the mechanisms, or as `parse_attention_options`.
    """
    texts: dict[str, list[str]] = {}
    for pair in pairs:
        name, dot, rest = pair.partition(".")
        if not dot or name not in mechanisms:
            raise ValueError(
                "--attention-options: with several mechanisms expected NAME.key=value, where NAME is one of "
                f"{', '.join(mechanisms)}; found {pair!r}"
            )
        texts.setdefault(name, []).append(rest)
    return {name: parse_attention_options(rest, mechanisms[name], name) for name, rest in texts.items()}


def _option_annotations(mechanism: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(mechanism.__init__ if inspect.isclass(mechanism) else mechanism)
    parameters = inspect.signature(mechanism).parameters
    return {key: hints.get(key, str) for key in parameters if key not in _SHAPE_ARGUMENTS}


def _parse(text: str, annotation: Any, what: str) -> Any:
    for candidate in _alternatives(annotation):
        try:
            return _PARSERS.get(candidate, _parse_compound)(text, candidate)
        except ValueError:
            continue
    raise ValueError(f"{what}: expected {_describe(annotation)}, found {text!r}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, None first and text last, since a text takes anything."""
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(sorted(typing.get_args(annotation), key=lambda member: (member is str) - (member is types.NoneType)))


def _parse_none(text: str, _: Any) -> None:
    if text.lower() != "none":
        raise ValueError


def _parse_bool(text: str, _: Any) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError
    return _WORDS[text.lower()]


def _parse_compound(text: str, annotation: Any) -> Any:
    """A literal, or a sequence written with commas."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return {str(value): value for value in arguments}[text] if text in map(str, arguments) else _refuse()
    if arguments and inspect.isclass(typing.get_origin(annotation)):
        return tuple(_parse(part, arguments[0], "") for part in text.split(","))
    return _refuse()


def _refuse() -> Any:
    raise ValueError


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    members = _alternatives(annotation)
    return " or ".join(_NAMES.get(member, _describe(member) if len(members) > 1 else str(member)) for member in members)


_PARSERS: dict[Any, Callable[[str, Any], Any]] = {
    types.NoneType: _parse_none,
    bool: _parse_bool,
    int: lambda text, _: int(text),
    float: lambda text, _: float(text),
    str: lambda text, _: text,
}
_NAMES = {types.NoneType: "none", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
