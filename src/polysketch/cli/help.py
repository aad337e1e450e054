"""The help of a command, made of the dataclass of its flags: `-h` a line for each flag, `--help` all about each.

The parser is tyro's. Its own help breaks lines where the source does and names types as Python does; this one is
written for a terminal of 80 columns.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shlex
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

__all__ = ["asks_for_help", "help_of", "subcommands_of"]

_WIDEST, _NARROWEST = 100, 60
_LONGEST_TITLE = 70  # a longer first line of a docstring is no heading
_INDENT, _COLUMN = "  ", 28
_NAMES = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH"}


class _Flag(NamedTuple):
    """What help says of one field."""

    name: str
    value: str  # what is given: N, PATH, {a,b}; nothing for a switch
    text: str
    default: str
    positional: bool
    required: bool

    @property
    def shown(self) -> str:
        if self.positional:
            return self.name
        return f"--{self.name} {self.value}".rstrip()


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether `-h` or `--help` stands among arguments, before a `--`."""
    before = list(arguments)[: arguments.index("--")] if "--" in arguments else list(arguments)
    return "-h" in before or "--help" in before


def help_of(command: str, flags_class: type, arguments: Sequence[str] = ("--help",), width: int | None = None) -> str:
    """The text that `polysketch COMMAND --help` shows.

    Args:
        command: what is typed before the flags: `polysketch train`.
        flags_class: the dataclass of the flags. Its docstring is the description, those of its fields are the help of
            the flags, and the first line of the docstring of each class it inherits from is the heading of that
            class's flags. A class whose single field is one of several dataclasses has subcommands.
        arguments: what was typed after it: a subcommand perhaps, `-h` for a line each, `--help` for everything.
        width: columns of the text. Default: as many as the terminal has, at least 60 and at most 100.
    """
    columns = width or min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    choices = subcommands_of(flags_class)
    chosen = next((one for one in arguments if one in choices), None)
    if chosen is not None:
        return help_of(f"{command} {chosen}", choices[chosen], arguments, width=columns)
    short = "--help" not in arguments
    if choices:
        return _help_ofsubcommands_of(command, flags_class, choices, columns)
    groups = _groups(flags_class)
    flags = [flag for _, group in groups for flag in group]
    parts = [_usage(command, flags, columns), *_description(flags_class, columns, short=short)]
    for title, group in groups:
        lines = [_line(flag, columns) if short else _paragraph(flag, columns) for flag in group]
        parts.append(f"{title}:\n" + "\n".join(lines))
    if short:
        parts.append(f"{command} --help says more of each.")
    return "\n\n".join(parts)


def _usage(command: str, flags: Sequence[_Flag], width: int) -> str:
    asked = [flag.shown for flag in flags if flag.required or flag.positional]
    return _filled(f"usage: {command} [OPTIONS] {' '.join(asked)}".rstrip(), width, after=" " * 11)


def _help_ofsubcommands_of(command: str, flags_class: type, choices: dict[str, type], width: int) -> str:
    listed = []
    for name, one in choices.items():
        first = " ".join(_paragraphs(inspect.getdoc(one) or "")[0].split())
        listed.append(_in_columns(name, _first_sentence(first), width))
    described = _description(flags_class, width, short=False)
    usage = f"usage: {command} [--help] NAME [OPTIONS]"
    return "\n\n".join([usage, *described, "names:\n" + "\n".join(listed), f"{command} NAME --help lists its flags."])


def _description(flags_class: type, width: int, *, short: bool) -> Iterator[str]:
    """The paragraphs of the docstring; what is indented, and lines that begin with the command, stay as they are."""
    paragraphs = _paragraphs(inspect.getdoc(flags_class) or "")
    for paragraph in paragraphs[: 1 if short else None]:
        first, *rest = paragraph.splitlines()
        if rest and all(line.startswith(" ") for line in rest) and first.endswith(":"):
            yield paragraph
        elif first.startswith("polysketch "):
            yield textwrap.indent(paragraph, _INDENT)
        else:
            yield _filled(" ".join(paragraph.split()), width)


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def _paragraph(flag: _Flag, width: int) -> str:
    default = f" [default: {flag.default}]" if flag.default else ""
    return _in_columns(flag.shown, flag.text + default, width)


def _line(flag: _Flag, width: int) -> str:
    """The flag and its first sentence, cut to one line."""
    room = width - max(_COLUMN, len(_INDENT + flag.shown) + 2)
    return _in_columns(
        flag.shown, textwrap.shorten(_first_sentence(flag.text), max(room, 12), placeholder=" ..."), width
    )


def _in_columns(left: str, right: str, width: int) -> str:
    """Two columns; a left side that is too long has a line of its own, or pushes a right side of one line."""
    head = _INDENT + left
    lines = textwrap.wrap(right, width - _COLUMN, break_long_words=False, break_on_hyphens=False) or [""]
    if len(head) + 2 <= _COLUMN:
        first = head.ljust(_COLUMN) + lines.pop(0)
    elif len(lines) == 1 and len(head) + 2 + len(lines[0]) <= width:
        first = f"{head}  {lines.pop(0)}"
    else:
        first = head
    return "\n".join([first.rstrip(), *(" " * _COLUMN + line for line in lines)])


def _filled(text: str, width: int, after: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def _first_sentence(text: str) -> str:
    for end in (". ", "; "):
        text = text.partition(end)[0]
    return text.removesuffix(".")


def _groups(flags_class: type) -> list[tuple[str, list[_Flag]]]:
    """The flags by the class that declares them, the command's own class first and those it inherits from after it."""
    hints = typing.get_type_hints(flags_class, include_extras=True)
    owners = [one for one in flags_class.__mro__ if dataclasses.is_dataclass(one)]
    texts = {owner: _texts(owner) for owner in owners}
    titled: dict[str, list[_Flag]] = {}
    for owner in [flags_class, *reversed([one for one in owners if one is not flags_class])]:
        first = (inspect.getdoc(owner) or "").splitlines()[0].rstrip(".")
        title = "options" if owner is flags_class or len(first) > _LONGEST_TITLE else first
        for field in dataclasses.fields(flags_class):
            declaring = [one for one in owners if field.name in texts[one]]
            home = declaring[-1] if declaring else flags_class
            if home is owner:
                text = texts[declaring[0]][field.name] if declaring else ""
                titled.setdefault(title, []).append(_flag(field, hints[field.name], text))
    for flags in titled.values():
        flags.sort(key=lambda flag: (not flag.positional, not flag.required))
    return list(titled.items())


def _texts(owner: type) -> dict[str, str]:
    """The strings under the fields of a class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError, SyntaxError):  # made in a session, without a file
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and said:
            found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _flag(field: dataclasses.Field[Any], hint: Any, text: str) -> _Flag:
    kind, marks = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is typing.Annotated else (hint, ())
    names = {str(getattr(mark, "name", mark)).lower() for mark in marks}
    metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
    positional = any("positional" in name for name in names)
    missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    flag = field.name.replace("_", "-")
    if positional:
        return _Flag(metavar or flag.upper(), "", text, "", True, missing)
    if kind is bool:
        switch = f"no-{flag}" if field.default is True else flag
        return _Flag(switch, "", text if field.default is not True else f"Switch off: {text}", "", False, False)
    repeated = any("append" in name for name in names)
    value = metavar or _value(kind, several=not repeated)
    return _Flag(flag, value, text, "" if missing else _default(field), False, missing)


def _value(kind: Any, *, several: bool = True) -> str:
    """What is given after a flag of a type."""
    arguments = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if get_origin(kind) in (Union, types.UnionType):
        simple = [one for one in arguments if get_origin(one) is not tuple]
        return _value((simple or arguments)[0], several=several)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return _value(arguments[0]) + (" ..." if several else "")
        return " ".join(map(_value, arguments))
    if kind is bool:
        return "{True,False}"
    return _NAMES.get(getattr(kind, "__name__", ""), "TEXT")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING or value is None or value is False or value in ((), "", {}):
        return ""
    return " ".join(shlex.quote(str(one)) for one in (value if isinstance(value, tuple) else (value,)))


def subcommands_of(flags_class: type) -> dict[str, type]:
    """The dataclasses by name, where a dataclass of flags has one field that is one of several; else none."""
    hints = list(typing.get_type_hints(flags_class, include_extras=True).values())
    if len(hints) != 1:
        return {}
    hint = get_args(hints[0])[0] if get_origin(hints[0]) is typing.Annotated else hints[0]
    if get_origin(hint) not in (Union, types.UnionType):
        return {}
    found = {}
    for one in get_args(hint):
        if get_origin(one) is typing.Annotated and dataclasses.is_dataclass(get_args(one)[0]):
            found[next(mark.name for mark in get_args(one)[1:] if getattr(mark, "name", None))] = get_args(one)[0]
    return found
