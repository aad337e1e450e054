"""Wrong usage is one line with status 2: which flag, what it takes, what was found, where all flags are listed."""

import re

import pytest

from polysketch.cli import main

LISTED = r"; polysketch \w+ --help lists what it takes\n"
COMMAS = r" \(a flag takes one value, or some with commas between\)"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train --data x --heads 2", r"no such flag or argument: --heads, 2 \(like --threads\?\)"),
        ("train --data d --layers 1 2", rf"no such flag or argument: 2{COMMAS}"),
        ("evaluate run --contexts 256 512", rf"no such flag or argument: 512{COMMAS}"),
        ("benchmark attention --lengths 256,512", "--lengths: expected values with spaces between, found 256, 512"),
        ("train --data d --steps -1", "--steps: expected at least 1, found -1"),
        ("evaluate a b", "no such flag or argument: b"),
        ("train", "needed: --data"),
        ("convert", "needed: MODEL, --data, --out"),
        ("train --no-such-flag 3", "needed: --data; no such flag or argument: --no-such-flag, 3"),
        ("train --data", r"Missing value for argument '--data'\. Expected 1 values"),
        ("train --data d --threads x", "--threads: expected INT, found 'x'"),
        ("train --data d --steps ten", "--steps: expected INT, found 'ten'"),
        ("train --data d --learning-rate x", "--learning-rate: expected FLOAT, found 'x'"),
        (
            "train --data d --schedule up",
            r"invalid choice 'up' for argument '--schedule'\. Expected one of \('linear',.*\)",
        ),
        ("train --data d --betas a b", r"--betas: Could not parse arguments \['a', 'b'\] .*"),
        ("benchmark nope", "no such flag or argument: nope"),
    ],
)
def test_it_is_one_line(capsys, arguments, line):
    words = arguments.split()
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"polysketch {words[0]}: {line}{LISTED}", shown.err)


def test_it_cannot_steer_a_terminal(capsys):
    assert main(["train", "--data", "d", "\x1b]0;title\x07"]) == 2
    assert "\x1b" not in capsys.readouterr().err
