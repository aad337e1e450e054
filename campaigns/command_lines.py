"""Command lines drawn from the dataclasses of the commands' flags: good values, odd ones and hostile ones.

A call is a fork of the campaign, which imported ahead what the command needs; every fiftieth begins with Python anew.
"""

import contextlib
import dataclasses
import io
import os
import random
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from campaigns import console
from campaigns.ahead import import_ahead
from campaigns.isolated import Ended, complaint, isolated
from campaigns.subjects import write_llama
from polysketch.cli import VERBS, flags_of, main
from polysketch.cli.help import subcommands_of
from polysketch.data import PreparedData

_SHARES = ["--validation-share", "0.2", "--test-share", "0.2"]
_SIZES = ["--layers", "1", "--context", "32", "--batch-size", "2", "--steps", "1", "--eval-tokens", "64"]
_CONVERSION = ["--context", "32", "--batch-size", "2", "--transfer-steps", "1", "--tuning-steps", "1"]
_SMALL = ["--sketch-size", "8", "--local", "8", "--repeats", "1", "--threads", "1"]
BASES: dict[str, list[str]] = {
    "prepare": ["texts", "--out", "new", "--no-progress", *_SHARES],
    "train": ["--data", "data", "--out", "new", "--no-tensorboard", *_SIZES],
    "evaluate": ["run", "--max-tokens", "50"],
    "generate": ["run", "--max-new-tokens", "2"],
    "compare": ["run"],
    "verify": ["run"],
    "export": ["run", "new"],
    "import": ["exported", "new"],
    "convert": ["llama", "--data", "data", "--out", "new", *_CONVERSION],
    "task": ["reversal", "--set", "length=8", "--out", "new"],
    "study": ["reversal", "--out", "new", "--results", "new", "--only", "softmax"],
    "serve": ["run", "--port", "0"],
    "benchmark attention": ["--lengths", "32", "--mechanisms", "given", "--heads", "1", "--head-dim", "8", *_SMALL],
    "benchmark hyper": ["--lengths", "32", "--heads", "1", "--min-length", "8", "--repeats", "1", "--threads", "1"],
    "benchmark training": ["--contexts", "32", "--preset", "tiny", *_SMALL],
    "benchmark decoding": ["--positions", "32", "--preset", "tiny", *_SMALL],
    "benchmark tune": ["--budget-seconds", "1"],
}
"""For each command a line that works; `new` is not there."""

_ODD: dict[Any, list[str]] = {
    int: [
        "-1",
        "0",
        "1",
        "2",
        "3",
        "7",
        "x",
        "1.5",
        "",
        "1e3",
        "99999999999999999999",
        "2000000000",
        "٣",
        "0x10",
        "1_0",
    ],
    float: ["nan", "inf", "-inf", "-1", "0", "0.3", "1", "x", "1e300", "1e-320", "", "1,5"],
    Path: [
        *("no/such/file", "/dev/null/x", "/dev/null", "/dev/zero", "texts/0.txt", "texts", "data", "run", "exported"),
        *("llama", "llama/config.json"),
        *("\x1b[31m\n", "", ".", "..", "pipe", "a" * 300, "run/config.json", "data/train.bin", "new/deeper", "looping"),
        *("prompts.jsonl", "new.png", "\udcff"),
    ],
    str: [
        *(
            "",
            "no-such",
            "\x1b]0;x\x07",
            "-",
            "a=b",
            ",,,",
            "0",
            "-1",
            "None",
            "text",
            "cpu",
            "cuda:99",
            "meta",
            "\udcff",
        ),
        *("length=0", "length=[[[", "length=NaN", 'length="x"', "steps=1e400", "=", "a=" + "[" * 100_000, "x" * 10_000),
        *(
            "polysketch",
            "softmax",
            "sketch_size=0",
            "window=-3",
            "sketch_size=99999999999",
            "0,1",
            "1,x",
            "1;2",
            "../x",
        ),
        *(
            "bpe:300",
            "bpe:",
            "bpe:-1",
            "bpe:99999999999999999999",
            "sentencepiece:3",
            "run",
            "data",
            "texts/0.txt",
            "*",
        ),
        *(
            "softmax:1",
            "all",
            "every:2",
            "0-9",
            "latest",
            "step-00000001",
            "step-../../x",
            "final",
            "auto",
        ),
    ],
    bool: ["True", "False", "x", ""],
}
_ENDLESS = {"steps", "repeats", "trials", "max_new_tokens", "num_samples", "seeds", "tuning_steps", "transfer_steps"}
_ENDLESS |= {
    "distillation_steps",
    "compile",
    "grace",
    "budget_seconds",
    "beams",
    "lookup",
    "lengths",
    "contexts",
    "positions",
}
_WRITTEN = ("out", "plot", "results", "folder", "run")
SECONDS, SECONDS_OF_ENDLESS, SECONDS_TO_IMPORT = 120, 6, 60
ANEW = 50
"""Of so many calls one is no fork."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
        name: as in Python.
        hint: its type.
        is_positional: whether no name is typed before it.
    """

    name: str
    hint: Any
    is_positional: bool

    @property
    def typed(self) -> str:
        return "--" + self.name.replace("_", "-")


def flags_of_command(command: str) -> list[Flag]:
    """The flags of a command, or of one of a command's subcommands."""
    verb, *names = command.split()
    owner = subcommands_of(flags_of(verb))[names[0]] if names else flags_of(verb)
    hints = typing.get_type_hints(owner, include_extras=True)
    found = []
    for field in dataclasses.fields(owner):
        marks = typing.get_args(hints[field.name])[1:] if typing.get_origin(hints[field.name]) is Annotated else ()
        positional = any("Positional" in str(getattr(mark, "name", mark)) for mark in marks)
        found.append(Flag(field.name, hints[field.name], positional))
    return found


def values_of(hint: Any) -> list[str]:
    """What may be typed for a flag of a type: what fits and what does not."""
    if typing.get_origin(hint) is Annotated:
        return values_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Literal:
        return [*map(str, typing.get_args(hint)), "", "no-such"]
    inner = [one for one in typing.get_args(hint) if one not in (type(None), Ellipsis)]
    if inner:
        return [value for one in inner for value in values_of(one)] + (
            ["None"] if type(None) in typing.get_args(hint) else []
        )
    return _ODD.get(hint, _ODD[str])


def drawn_line(command: str, flags: list[Flag], draw: random.Random) -> tuple[list[str], set[str]]:
    """A line of a command with up to four flags more, or with other values; and the flags that were drawn."""
    line, drawn = list(BASES[command]), set()
    for flag in draw.sample(flags, min(draw.choice((0, 1, 1, 1, 2, 2, 3, 4)), len(flags))):
        drawn.add(flag.name)
        values = values_of(flag.hint)
        if flag.is_positional:
            if line and not line[0].startswith("-"):
                line[0] = draw.choice(values)
            continue
        if flag.hint is bool:
            line.append(draw.choice((flag.typed, flag.typed.replace("--", "--no-"))))
            continue
        if flag.typed in line:
            place = line.index(flag.typed)
            del line[place : place + 2]
        given = [draw.choice(values) for _ in range(draw.choice((1, 1, 1, 2)) if "tuple" in str(flag.hint) else 1)]
        together = given[0].startswith("-") or draw.random() < 0.1
        line += [f"{flag.typed}={given[0]}", *given[1:]] if together else [flag.typed, *given]
    if draw.random() < 0.05:
        line.insert(draw.randrange(len(line) + 1), draw.choice(("--", "--no-such", "-x", "", "--out", "\x1b[2J")))
    return line, drawn


def make_place(folder: Path) -> None:
    """What commands work on, in the folder that they run in: texts, prepared data, a run, an exported model, a
    Llama."""
    (folder / "texts").mkdir()
    for number in range(24):
        (folder / f"texts/{number}.txt").write_text(f"Once upon a time there were {number} foxes. " * 20)
    (folder / "prompts.jsonl").write_text('"Once"\n{"prompt": "upon"}\n')
    (folder / "looping").symlink_to("looping")
    os.mkfifo(folder / "pipe")
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for line in (
            ["prepare", "texts", "--out", "data", "--no-progress", *_SHARES],
            ["train", "--data", "data", "--out", "run", *_SIZES],
            ["export", "run", "exported"],
        ):
            if main(line):
                raise RuntimeError(f"expected a folder to attack, found that this fails: polysketch {' '.join(line)}")
        write_llama("llama", PreparedData.open(Path("data")).tokenizer.vocab_size)


def contents() -> dict[str, bytes]:
    """Every file below the working folder, but for locks and what commands make."""
    files = [path for path in sorted(Path().rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = [path for path in files if "lock" not in path.name and not path.parts[0].startswith("new")]
    return {str(path): path.read_bytes() for path in kept}


def call(command: str, line: list[str], drawn: set[str], *, anew: bool = False) -> Ended:
    """One call in a process of its own: a fork, or one that Python starts anew."""
    words = [*command.split(), *line]
    seconds = SECONDS_OF_ENDLESS if _is_endless(command, drawn) else SECONDS
    if anew:
        return isolated(lambda: console.start_anew(words), seconds=seconds + SECONDS_TO_IMPORT)
    return isolated(lambda: _as_typed(words), seconds=seconds)


def _as_typed(words: list[str]) -> int:
    random.seed()
    torch.seed()
    sys.argv = ["polysketch", *words]
    _rate_in_passing()
    return console.script()


def _rate_in_passing() -> None:
    """Benchmarks take small tensors for what the machine can do, which takes them two seconds else."""
    from polysketch.benchmarking import workbench

    workbench._COPIED_BYTES = 1 << 16
    workbench.measure_rates.__defaults__ = (64,)


def _is_endless(command: str, drawn: set[str]) -> bool:
    """Whether it was asked for work that may take longer than anybody waits: tracing a graph, a larger study, or a
    needle looked for in spans of two tokens."""
    return (
        bool(drawn & _ENDLESS)
        or (command == "export" and "format" in drawn)
        or (command == "study" and "size" in drawn)
        or (command == "evaluate" and "needle" in drawn)
    )


def attacks(command: str, count: int, draw: random.Random) -> Iterator[tuple[str, str | None, str]]:
    """So many calls of a command in the working folder: what was typed, what is wrong, and what came of it."""
    flags, before = flags_of_command(command), contents()
    _prepare_for(command)
    _restore(before)
    for number in range(1, count + 1):
        line, drawn = drawn_line(command, flags, draw)
        _clear()
        anew = number % ANEW == 0
        ended = call(command, line, drawn, anew=anew)
        wrong = complaint(ended, may_go_on=_is_endless(command, drawn))
        written = _written(line, flags)
        after = contents()
        changed = [name for name, content in before.items() if after.get(name) != content]
        _restore({name: before[name] for name in changed})
        lost = [name for name in changed if not any(Path(name).is_relative_to(path) for path in written)]
        if lost:
            wrong = f"{wrong or 'done'}, and these files changed: {', '.join(lost[:5])}"
        outcome = "at work until stopped" if ended.is_hang else ("done", "refused", "wrong usage")[min(ended.status, 2)]
        outcome = f"{outcome}, by Python anew" if anew else outcome
        yield f"polysketch {command} {' '.join(map(_shown, line))}", wrong, outcome


def _prepare_for(command: str) -> None:
    """Import what the command does, and fill the parser's caches, so that its forks need not."""
    words = [*command.split(), *BASES[command]]
    import_ahead(lambda: _as_typed(words), SECONDS)
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        tyro.cli(flags_of(words[0]), args=words[1:])


def _shown(value: str) -> str:
    return repr(value if len(value) < 80 else value[:60] + f"...({len(value)})")


def _clear() -> None:
    for path in Path().iterdir():
        if path.name.startswith("new"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _written(line: list[str], flags: list[Flag]) -> set[Path]:
    """Files and folders that a command was told to write."""
    typed = {flag.typed for flag in flags if flag.name in ("out", "plot", "results")}
    found = {Path("new")}
    for place, word in enumerate(line):
        name, equals, value = word.partition("=")
        if name in typed:
            found.add(Path(value if equals else (line[place + 1] if place + 1 < len(line) else "")))
    return {path for path in found if path != Path()}


def _restore(before: dict[str, bytes]) -> None:
    for name, content in before.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


def commands() -> list[str]:
    """Those that are called; every verb is among them."""
    missing = set(VERBS) - {command.split()[0] for command in BASES}
    if missing:
        raise RuntimeError(f"expected a line for every command, found none for {', '.join(sorted(missing))}")
    return list(BASES)
