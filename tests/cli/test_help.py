"""The help of every command: it fits a terminal, names every flag and its default, and its examples are right."""

import dataclasses
import re
import shlex
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from polysketch import cli
from polysketch.cli import flags_of, main
from polysketch.cli.benchmark.tune import Op
from polysketch.cli.help import asks_for_help, help_of, subcommands_of

COMMANDS = [(verb, name) for verb in cli.VERBS for name in ("", *subcommands_of(flags_of(verb)))]


def shown(verb: str, name: str, form: str, width: int = 80) -> str:
    return help_of(f"polysketch {verb}", flags_of(verb), [name, form], width=width)


def class_of(verb: str, name: str) -> type:
    return subcommands_of(flags_of(verb))[name] if name else flags_of(verb)


@pytest.mark.parametrize("form", ["-h", "--help"])
@pytest.mark.parametrize(("verb", "name"), COMMANDS)
def test_it_fits_eighty_columns_and_speaks_no_python(verb, name, form):
    text = shown(verb, name, form)
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text
    assert "NoneType" not in text
    assert "(default" not in text


@pytest.mark.parametrize(("verb", "name"), [one for one in COMMANDS if one != ("benchmark", "")])
def test_every_flag_is_there_once_with_its_text_and_its_default(verb, name):
    text = " ".join(shown(verb, name, "--help").split())
    flags_class = class_of(verb, name)
    for field in dataclasses.fields(flags_class):
        flag = "--" + ("no-" if field.default is True else "") + field.name.replace("_", "-")
        if not re.search(rf"{flag}(?![\w-])", text):  # one without its dashes, by place
            assert "Positional" in str(typing.get_type_hints(flags_class, include_extras=True)[field.name]).title()
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"[default: {field.default}]" in text


@pytest.mark.parametrize(("verb", "name"), [one for one in COMMANDS if one != ("benchmark", "")])
def test_the_short_form_has_one_line_for_each_flag(verb, name):
    lines = shown(verb, name, "-h").splitlines()
    flags = [line for line in lines if re.match(r"  \S", line) and not line.startswith("  polysketch")]
    assert len(flags) == len(dataclasses.fields(class_of(verb, name)))


def examples() -> list[str]:
    found = []
    for verb, name in COMMANDS:
        text = shown(verb, name, "--help").replace("\\\n", " ")
        found += [line.strip() for line in text.splitlines() if line.startswith("  polysketch ")]
    return found


@pytest.mark.parametrize("example", examples())
def test_examples_are_what_the_parser_takes(example):
    _, verb, *arguments = shlex.split(example)
    if "--resume" in arguments:  # a run that is there says where its data is
        arguments += ["--data", "data/books"]
    tyro.cli(flags_of(verb), args=arguments)


def test_every_command_has_an_example():
    begun = [example.split() for example in examples()]
    assert {verb for verb in cli.VERBS} == {words[1] for words in begun}


def test_a_value_that_looks_like_help_is_none_behind_two_dashes():
    assert asks_for_help(["runs/own", "--help"])
    assert asks_for_help(["-h"])
    assert not asks_for_help(["runs/own", "--", "--help"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large it is."""

    width: int | None = None
    """Its width; as wide as the window where it is not given. Not less than 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Sizes):
    """Draw a picture.

    It is drawn at once.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """What to draw."""
    colours: tuple[Literal["red", "blue"], ...] = ("red", "blue")
    """Which colours."""
    frame: bool = True
    """Draw a frame."""


def test_what_it_says_of_a_small_class():
    expected = """usage: polysketch draw [OPTIONS] SOURCE

Draw a picture.

It is drawn at once.

options:
  SOURCE                    What to draw.
  --colours {red,blue} ...  Which colours. [default: red blue]
  --no-frame                Switch off: Draw a frame.

How large it is:
  --width N                 Its width; as wide as the window where it is not
                            given. Not less than 1."""
    assert help_of("polysketch draw", Example, width=80) == expected
    assert "  --width N                 Its width\n" in help_of("polysketch draw", Example, ["-h"], width=80)


def test_it_is_as_wide_as_the_terminal_within_limits(monkeypatch, capsys):
    widths = {}
    for columns in ("20", "80", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["prepare", "--help"]) == 0
        widths[columns] = max(len(line) for line in capsys.readouterr().out.splitlines() if " polysketch " not in line)
    assert 20 < widths["20"] <= 60
    assert 70 < widths["80"] <= 80
    assert 90 < widths["400"] <= 100


def test_every_op_that_can_be_tuned_is_named():
    text = shown("benchmark", "tune", "--help")
    for op in typing.get_args(Op):
        assert re.search(rf"\b{op}\b[,;]", text), op
