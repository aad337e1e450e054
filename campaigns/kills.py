"""Commands killed at random moments, then given again: what they leave is what they leave when nobody disturbs them.

    python -m campaigns.kills --count 200 --seed 0

An attack is a small command (`campaigns.subjects`), stopped up to three times by KILL, TERM, INT, two of these in a
row, a pause (STOP, CONT), or a power cut, which takes back what was not waited for to be on the disk. The moment is one
of the clock, one in the first tenth of the work, or a call that writes, syncs, renames or deletes. Some processes start
as a user's do, most from a fork. After each stop, what stands under a final name is whole; at last the same command
ends well, and weights, optimizer, metrics and files are bit for bit those of the command left alone. A fault is
anything else, a traceback, and a process that does not end.
"""

import copy
import itertools
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from campaigns import faulty
from campaigns.faulty import SIGNAL, cut_power, preloaded, why_none
from campaigns.forked import Commands, Words, serving
from campaigns.harness import Found, main
from campaigns.subjects import SUBJECTS, Seen, Subject, make_given, whole_lines
from polysketch.training.checkpoint import list_checkpoints

_ENDS = {
    "KILL": {-signal.SIGKILL},
    "POWER": {-signal.SIGKILL},
    "TERM": {-signal.SIGTERM, 128 + signal.SIGTERM},
    "INT": {-signal.SIGINT, 128 + signal.SIGINT},
    "STOP": set(),
}
"""How a stopped process may end, besides well."""

_HOW = ("KILL", "KILL", "KILL", "POWER", "POWER", "TERM", "INT", "STOP", "TERM TERM", "INT INT", "INT KILL")
_WHEN = ("clock", "clock", "call", "call", "early")
_WEIGHTS: dict[str, float] = {
    "train": 10,
    "pair": 2,
    "four": 2,
    "compile": 0.3,
    "prepare": 2,
    "convert": 2,
    "export": 2,
}
_DROPPED = re.compile(r"Exception ignored in.*?\nKeyboardInterrupt: *\n", re.DOTALL)
_PATIENCE = 600.0
_ALONE = 8.0  # seconds in which a process may notice by itself that another is gone
_PAUSE = 0.15  # seconds between STOP and CONT


@dataclass(frozen=True)
class Stop:
    """How a process is stopped.

    Attributes:
        how: signals, one after the other.
        when: `clock`, `early` or `call`.
        share: of the time, or of the calls, of a process left alone; of the pause between two signals.
    """

    how: str
    when: str
    share: float


@dataclass(frozen=True)
class Alone:
    """A command that nobody disturbed.

    Attributes:
        seen: what it left.
        seconds: that it took.
        calls: that its process made.
    """

    seen: Seen
    seconds: float
    calls: int


class Arena:
    """Where commands are stopped.

    Args:
        commands: a server.
        folder: an empty one.
        armed: whether its processes can be stopped at a call.
    """

    def __init__(self, commands: Commands, folder: Path, *, armed: bool) -> None:
        self._commands, self._folder, self._armed = commands, folder, armed
        self._planted: tuple[str, ...] = ()
        self._alone: dict[str, Alone] = {}
        self._log, self._told = folder / "calls", folder / "told"
        self._numbers = itertools.count(1)

    def planted(self, *functions: str) -> "Arena":
        """The same, with `module:function` called in each process that is stopped: faults that are to be found."""
        other = copy.copy(self)
        other._planted = functions
        return other

    def alone(self, subject: Subject) -> Alone:
        """The command left alone; run once."""
        if subject.name not in self._alone:
            here = subject.begin(self._folder / f"{subject.name}-alone")
            started = time.monotonic()
            statuses = self._end(self._start(subject, here, Stop("", "", 0)))
            seconds = time.monotonic() - started
            if any(statuses):
                raise RuntimeError(f"{subject.name} left alone: status {statuses}: {self._told.read_text()}")
            self._alone[subject.name] = Alone(subject.seen(here), seconds, len(faulty.calls(self._log)))
        return self._alone[subject.name]

    def attack(self, subject: Subject, stops: Sequence[Stop], draw: random.Random, found: Found) -> None:
        """Stop a command so often, then let it end, and count what came of it."""
        alone, number = self.alone(subject), next(self._numbers)
        name = f"{number} {subject.name}"
        here = subject.begin(self._folder / str(number))
        for stop in stops:
            fresh = draw.random() < 0.1 and stop.when != "call" and not self._planted and not subject.before
            name += f", {'fresh ' if fresh else ''}{stop.how} at {stop.share:.3f} of {stop.when}"
            wrong, over = self._stopped(subject, here, stop, draw, alone, fresh=fresh)
            found.outcomes[f"{subject.name}: {stop.how} {_place(subject, here)}"] += 1
            if wrong or (over and subject.once):
                break
        else:
            wrong = []
        if not wrong:
            wrong = self._ended(subject, here, alone)
        for each in wrong:
            found.add(name, each, is_fault=True)

    def _stopped(
        self, subject: Subject, here: Path, stop: Stop, draw: random.Random, alone: Alone, *, fresh: bool
    ) -> tuple[list[str], bool]:
        """What is wrong after a stop, and whether the work is done."""
        processes = self._start(subject, here, stop, fresh=fresh)
        victims = processes if draw.random() < 0.3 else [draw.choice(processes)]
        if stop.when != "call":
            time.sleep(stop.share * alone.seconds * (0.1 if stop.when == "early" else 1.0))
            _send(victims, stop.how.partition(" ")[0])
        if second := stop.how.partition(" ")[2]:
            self._await_call(subject, stop, alone)
            time.sleep(draw.choice((0.0, 0.0, 0.05)) * draw.random())
            _send(victims, second)
        statuses = self._end(processes)
        if stop.how == "POWER" and self._armed:
            cut_power(self._log)
        allowed = {0}.union(*(_ENDS[part] for part in stop.how.split()))
        if subject.processes > 1 and stop.how != "STOP":
            allowed |= {1, -signal.SIGTERM}  # the others tell who is gone, or are told to end
        wrong = [f"status {status}: {self._words()}" for status in statuses if status not in allowed]
        if not (fresh and "INT" in stop.how):  # before Python has read the command, it shows where it was
            wrong += self._traceback()
        if subject.once and (here / subject.once).exists():
            return wrong, True
        return wrong + subject.problems(here, alone.seen), False

    def _await_call(self, subject: Subject, stop: Stop, alone: Alone) -> None:
        """Wait for the call at which a process gets its first signal, so that the second comes later."""
        until, number = time.monotonic() + alone.seconds, self._call(subject, stop).get("at", 0)
        while time.monotonic() < until and len(faulty.calls(self._log)) < number - 1:
            time.sleep(0.005)

    def _ended(self, subject: Subject, here: Path, alone: Alone) -> list[str]:
        """What is wrong with the same command, left alone at last."""
        if not (subject.once and (here / subject.once).exists()):
            statuses = self._end(self._start(subject, here, Stop("", "", 0)))
            if any(statuses):
                return [f"given again: status {statuses}: {self._words()}"]
        try:
            seen = subject.seen(here)
        except (ValueError, OSError, KeyError) as error:
            return [f"in the end: {type(error).__name__}: {error}"]
        names = sorted(seen.keys() | alone.seen.keys())
        return [f"in the end {name} is another" for name in names if seen.get(name) != alone.seen.get(name)]

    def _start(self, subject: Subject, here: Path, stop: Stop, *, fresh: bool = False) -> list[int]:
        faulty.forget(self._log)
        self._told.unlink(missing_ok=True)
        before, given = (*subject.before, *self._planted), {}
        if self._armed and not fresh:
            before = (*before, "campaigns.faulty:arm")
            given = {"folder": str(here), "log": str(self._log)} | self._call(subject, stop)
        words = Words(subject.argv(self._folder / "given", here), self._told, before=before, given=given, fresh=fresh)
        environment = {name: value.format(here=here) for name, value in subject.environment.items()}
        if subject.processes == 1:
            return [self._commands.start(replace(words, environment=environment))]
        world = {"WORLD_SIZE": str(subject.processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
        ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(subject.processes))
        return [self._commands.start(replace(words, environment={**environment, **world, **rank})) for rank in ranks]

    def _call(self, subject: Subject, stop: Stop) -> dict[str, Any]:
        if stop.when != "call":
            return {}
        number = signal.Signals[f"SIG{_first(stop.how)}"]
        calls = self._alone[subject.name].calls / subject.processes
        return {"at": 1 + int(stop.share * calls), "what": SIGNAL, "number": int(number)}

    def _end(self, processes: Sequence[int]) -> list[int]:
        """The statuses. Of several processes, the rest is told to end when one was killed, as torchrun does.

        One that is paused is told to go on; one that does not end is killed, for status 124.
        """
        statuses: dict[int, int] = {}
        started, told = time.monotonic(), False
        while left := [process for process in processes if process not in statuses]:
            _send([process for process in left if _is_paused(process)], "CONT")
            for process in left:
                if (status := self._commands.wait(process, _PAUSE)) is not None:
                    statuses[process] = status
            seconds, rest = time.monotonic() - started, [process for process in left if process not in statuses]
            if not told and seconds > _ALONE and any(statuses.values()):
                told = True
                _send(rest, "TERM")
            if seconds > _PATIENCE:
                _send(rest, "KILL")
                statuses |= {process: 124 for process in rest if self._commands.wait(process, _PATIENCE)}
        return [statuses[process] for process in processes]

    def _words(self) -> str:
        lines = self._told.read_text(errors="replace").splitlines() if self._told.exists() else []
        return " | ".join(lines[-3:])

    def _traceback(self) -> list[str]:
        """A traceback, but for those of interrupts that Python itself drops, in the middle of an import for one."""
        told = self._told.read_text(errors="replace") if self._told.exists() else ""
        told = _DROPPED.sub("", told)
        return [f"traceback: {self._words()}"] if "Traceback" in told else []


def _first(how: str) -> str:
    return {"POWER": "KILL"}.get(how.partition(" ")[0], how.partition(" ")[0])


def _send(processes: Sequence[int], how: str) -> None:
    for process in processes:
        os.kill(process, signal.Signals[f"SIG{_first(how)}"])


def _is_paused(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _place(subject: Subject, here: Path) -> str:
    """Where in its work a process was stopped, of a training run."""
    if subject.name not in ("train", "pair", "four"):
        return "before the end" if not (subject.once and (here / subject.once).exists()) else "at the end"
    checkpoints, lines = here / "run" / "checkpoints", whole_lines(here / "run" / "metrics.jsonl")
    if checkpoints.is_dir() and any(path.name.startswith(".step-") for path in checkpoints.iterdir()):
        return "in a save"
    if not list_checkpoints(checkpoints):
        return "before the first checkpoint"
    last = lines[-1] if lines else {"kind": "", "step": 0}
    if last["step"] == subject.steps and (here / "run" / "loss.png").exists():
        return "at the end"
    return "in an evaluation" if last["kind"] == "train" and last["step"] % 2 == 0 else "in a step"


def drawn(draw: random.Random, names: Sequence[str], *, armed: bool) -> tuple[str, list[Stop]]:
    """A command and how it is stopped."""
    (name,) = draw.choices(names, [_WEIGHTS.get(name, 1.0) for name in names])
    stops = [Stop(draw.choice(_HOW), draw.choice(_WHEN), draw.random()) for _ in range(draw.choice((1, 1, 1, 2, 2, 3)))]
    if not armed:
        stops = [replace(stop, how=stop.how.replace("POWER", "KILL"), when="clock") for stop in stops]
    return name, stops


def campaign(count: int, seed: int, folder: Path, names: Sequence[str] = tuple(SUBJECTS)) -> Found:
    """So many commands that are stopped.

    Args:
        count: of them.
        seed: of what is stopped, how and when; what a moment of the clock meets is another thing each time.
        folder: an empty one.
        names: of `SUBJECTS`, to draw from.
    """
    draw, found, armed = random.Random(seed), Found(), why_none() is None
    subjects = [SUBJECTS[name] for name in names]
    imports = tuple(dict.fromkeys(name for subject in subjects for name in subject.imports))
    with serving(imports, preloaded(folder) if armed else {}) as commands:
        make_given(commands, folder / "given", {need for subject in subjects for need in subject.needs})
        arena = Arena(commands, folder, armed=armed)
        for _ in range(count):
            name, stops = drawn(draw, names, armed=armed)
            arena.attack(SUBJECTS[name], stops, draw, found)
    return found


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 200, argv, parts=tuple(SUBJECTS))


if __name__ == "__main__":
    sys.exit(run())
