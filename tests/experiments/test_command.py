"""The command line of the experiments: a size stands for flags, and flags that are given count more."""

from dataclasses import dataclass
from typing import Literal

import pytest
from experiments.study.command import run_command

SIZES = {"smoke": "--steps 2 --lengths 4 8", "cpu": ""}


@dataclass(frozen=True)
class Flags:
    """A command of two numbers."""

    size: Literal["smoke", "cpu"] = "cpu"
    steps: int = 100
    lengths: tuple[int, ...] = (64,)


def parsed(*arguments: str) -> tuple[int, tuple[int, ...]]:
    """What a command is given."""
    found: list[Flags] = []

    def run(flags: Flags) -> int:
        found.append(flags)
        return 0

    assert run_command("command", run, list(arguments), sizes=SIZES) == 0
    return found[0].steps, found[0].lengths


def test_a_size_stands_for_its_flags_in_either_way_of_writing_it():
    assert parsed() == parsed("--size", "cpu") == (100, (64,))
    assert parsed("--size", "smoke") == parsed("--size=smoke") == (2, (4, 8))


def test_flags_that_are_given_count_more_than_those_of_the_size_wherever_they_stand():
    assert parsed("--steps", "7", "--size", "smoke") == parsed("--size", "smoke", "--steps", "7") == (7, (4, 8))
    assert parsed("--size", "smoke", "--lengths", "16") == (2, (16,))


def test_an_unknown_size_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed("--size", "huge")
    assert "huge" in capsys.readouterr().err


def test_a_failure_is_one_line_and_an_interruption_says_that_the_same_command_goes_on(capsys):
    def run(flags: Flags) -> int:
        raise ValueError("deliberately\nbroken") if flags.steps == 1 else KeyboardInterrupt

    assert run_command("experiments.command", run, ["--steps", "1"]) == 1
    assert capsys.readouterr().err == "command: deliberately broken\n"
    assert run_command("experiments.command", run, []) == 130
    assert "the same command goes on" in capsys.readouterr().err
