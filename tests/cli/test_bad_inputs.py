"""Whatever a flag is given: no traceback, no silence, nothing lost, nothing that hangs.

Every flag of every command gets every value that its type makes people try. Each call is a process of its own, with a
bound of memory and time. Some calls by default; all of them, about a thousand, with the marker `full`.
"""

import contextlib
import dataclasses
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch

from polysketch.cli import flags_of, main
from polysketch.cli.help import subcommands_of

SHARES = ["--validation-share", "0.2", "--test-share", "0.2"]
SIZES = ["--layers", "1", "--context", "32", "--batch-size", "2", "--steps", "1", "--eval-tokens", "64"]
CONVERSION = ["--context", "32", "--batch-size", "2", "--transfer-steps", "1", "--tuning-steps", "1"]
SMALL = ["--heads", "1", "--head-dim", "8", "--local", "8", "--repeats", "1"]
COMMANDS = {
    "prepare": ["texts", "--out", "new", "--no-progress", *SHARES],
    "train": ["--data", "data", "--out", "new", *SIZES],
    "evaluate": ["run", "--max-tokens", "50"],
    "generate": ["run", "--max-new-tokens", "2"],
    "compare": ["run"],
    "verify": ["run"],
    "export": ["run", "new"],
    "import": ["exported", "new"],
    "task": ["reversal", "--set", "length=8", "--out", "new"],
    "study": ["reversal", "--out", "new", "--results", "new", "--only", "softmax"],
    "benchmark attention": ["--lengths", "32", "--mechanisms", "given", *SMALL],
    "benchmark hyper": ["--lengths", "32", "--min-length", "8", "--heads", "1", "--head-dim", "8", "--repeats", "1"],
    "convert": ["exported", "--data", "data", "--out", "new", *CONVERSION],
}
ENDLESS = "2000000000"
VALUES = {
    int: ["-1", "0", "x", "99999999999999999999", ENDLESS, "1.5", ""],
    float: ["nan", "-inf", "-1", "x", "1e300"],
    Path: ["no/such/file", "/dev/null/x", "texts/0.txt", "texts", "\x1b[31m\n"],
    str: ["", "no-such", "\x1b]0;x\x07", "-", "a=b", ",,,"],
}
SAMPLE, SECONDS, BYTES = 2, 60, 12 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts, prepared data, a run and an exported model, in the folder that commands run in."""
    folder = tmp_path_factory.mktemp("bad")
    before = Path.cwd()
    os.chdir(folder)
    Path("texts").mkdir()
    for number in range(60):
        Path(f"texts/{number}.txt").write_text(f"Once upon a time there were {number} foxes. " * 8)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert main(["prepare", "texts", "--out", "data", "--no-progress", *SHARES]) == 0
        assert main(["train", "--data", "data", "--out", "run", *SIZES]) == 0
        assert main(["export", "run", "exported"]) == 0
    yield folder
    os.chdir(before)


def kind_of(hint: Any) -> type | None:
    """What a flag is given one of."""
    if typing.get_origin(hint) in (Annotated, Literal):
        return str if typing.get_origin(hint) is Literal else kind_of(typing.get_args(hint)[0])
    inner = [one for one in typing.get_args(hint) if one not in (type(None), Ellipsis)]
    if inner:
        return kind_of(inner[0])
    return hint if hint in VALUES else None


def calls(command: str) -> list[list[str]]:
    """The command's line with one flag more, or another value of one."""
    verb, *names = command.split()
    flags_class = subcommands_of(flags_of(verb))[names[0]] if names else flags_of(verb)
    hints = typing.get_type_hints(flags_class, include_extras=True)
    made = []
    for field in dataclasses.fields(flags_class):
        flag = "--" + field.name.replace("_", "-")
        for value in VALUES.get(kind_of(hints[field.name]), ()):  # type: ignore[call-overload]
            if field.name in ("out", "plot") and value == "texts/0.txt":  # a file that is named is written
                continue
            line = list(COMMANDS[command])
            if flag in line:
                del line[line.index(flag) : line.index(flag) + 2]
            made.append([verb, *names, *line, *([f"{flag}={value}"] if value.startswith("-") else [flag, value])])
    return made


def contents() -> dict[str, bytes]:
    files = [path for path in Path().rglob("*") if path.is_file() and not path.is_relative_to("new")]
    return {str(path): path.read_bytes() for path in files if "lock" not in path.name}


def outcome(line: list[str]) -> tuple[int, str]:
    """Exit status, below zero where a signal ended it, and standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            _run_and_exit(line, errors.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read()


def _run_and_exit(line: list[str], errors: int) -> None:
    status = 99
    try:
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not what pytest does of it
        signal.alarm(SECONDS)
        os.dup2(errors, 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stdin = open(os.devnull, "w"), open(os.devnull)  # noqa: SIM115
        torch.set_num_threads(1)  # those of the parent are not in a forked child, which would wait for them for ever
        status = main(line)
    except BaseException:  # noqa: BLE001  (whatever it is, it is what the test looks for)
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


def complaint(line: list[str], before: dict[str, bytes]) -> str | None:
    """What is wrong with how a call ends."""
    shutil.rmtree("new", ignore_errors=True)
    shutil.rmtree("new.partial", ignore_errors=True)
    status, errors = outcome(line)
    if status == -signal.SIGALRM and line[-1].endswith(ENDLESS):
        return None  # it was asked for so many steps or tokens, and makes them
    if status not in (0, 1, 2) or "Traceback" in errors:
        return f"exit status {status}: {errors[-300:]}"
    lines = [text for text in errors.splitlines() if text.startswith("polysketch: ")]
    wrong_usage = status == 2 and len(errors.splitlines()) != 1
    if wrong_usage or (status == 1 and len(lines) != 1) or (status and not errors.strip()):
        return f"exit status {status} without one line that says why: {errors[-300:]}"
    after = contents()
    return (
        None if all(after.get(name) == content for name, content in before.items()) else "files that were there changed"
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.full)])
def test_every_flag_takes_whatever_people_give_it(place, command, share):
    lines = calls(command)
    if share == "some":
        lines = random.Random(command).sample(lines, SAMPLE)
    before = contents()
    found = {" ".join(line): complaint(line, before) for line in lines}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def test_there_are_hundreds():
    assert sum(len(calls(command)) for command in COMMANDS) >= 300
