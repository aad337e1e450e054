"""A fault of the disk before every call that writes, syncs, renames, deletes, makes or cuts a file, of eleven commands.

    python -m campaigns.disks --count 600 --seed 0

A command is left alone first, and its calls are counted. Then it is given again and again, and one of the calls fails
(`campaigns.faulty`): a full disk and one that turned read-only stay so, a permission is missing, one call ends in an
I/O error, one write is short, a short write is the last before the disk is full. Every call of every command has its
turn where `--count` is at least the number of faults that there are; of fewer the seed draws which. After a fault, the
exit status is 1 and one line says what is wrong, or the command is done and its files are right. What stands under a
final name is whole, checkpoints by their sums, and the same command with a disk that works ends well, with the right
bytes. Where the machine lets us mount small file systems, the commands run into their end, too.
"""

import errno
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from campaigns import faulty
from campaigns.faulty import ANY, CUT, FAIL, MAKE, RENAME, SHORTEN, UNLINK, WRITE, preloaded, why_none
from campaigns.forked import Commands, Words, serving
from campaigns.harness import Found, main
from campaigns.subjects import SUBJECTS, Seen, Subject, make_given


@dataclass(frozen=True)
class Fault:
    """What a disk does.

    Attributes:
        what: `FAIL` or `SHORTEN`.
        number: of the error.
        kinds: of calls that it may happen at.
        lasting: whether later ones fail too.
    """

    what: int
    number: int
    kinds: int
    lasting: bool = False


FAULTS = {
    "full": Fault(FAIL, errno.ENOSPC, WRITE | MAKE, lasting=True),
    "read-only": Fault(FAIL, errno.EROFS, WRITE | MAKE | RENAME | UNLINK | CUT, lasting=True),
    "no permission": Fault(FAIL, errno.EACCES, MAKE | RENAME | UNLINK),
    "I/O error": Fault(FAIL, errno.EIO, ANY),
    "short": Fault(SHORTEN, 0, WRITE),
    "short and full": Fault(SHORTEN, errno.ENOSPC, WRITE, lasting=True),
}
"""By name. Permissions and read-only disks stop what is opened, renamed and deleted; a full one what is added."""

NAMES = tuple(name for name, subject in SUBJECTS.items() if subject.processes == 1 and name != "compile")
"""Subjects of one process; what a compiler writes is not looked at."""

_MANY = 40  # faults from which on small file systems are tried too
_SECONDS = 600.0


def short(subject: Subject) -> Subject:
    """With fewer steps: half of the calls, and all kinds of them."""
    return replace(subject, words=subject.words.replace("--steps 8", "--steps 3").replace("--eval-tokens 2000", ""))


class Arena:
    """Where disks fail.

    Args:
        commands: a server whose processes can be armed.
        folder: an empty one.
        planted: functions called in each process, `module:function`: faults that are to be found.
    """

    def __init__(self, commands: Commands, folder: Path, planted: Sequence[str] = ()) -> None:
        self._commands, self._folder, self._planted = commands, folder, tuple(planted)
        self._log, self._told = folder / "calls", folder / "told"
        self._ends: dict[str, Seen] = {}
        self._numbers = itertools.count(1)

    def faults(self, subject: Subject) -> list[tuple[str, str, int]]:
        """Every fault of a command: its name, the disk's, and the number of the call."""
        here = subject.begin(self._folder / f"{subject.name}-alone")
        status = self._run(subject, here)
        if status:
            raise RuntimeError(f"{subject.name} left alone: status {status}: {self._words()}")
        self._ends[subject.name] = subject.seen(here)
        calls = list(enumerate(faulty.calls(self._log), 1))
        return [
            (subject.name, name, number)
            for name, fault in FAULTS.items()
            for number, call in calls
            if call.of_kind & fault.kinds
        ]

    def attack(self, subject: Subject, name: str, call: int, found: Found) -> None:
        """Let a disk fail at a call, and the command be given again."""
        fault, here = FAULTS[name], subject.begin(self._folder / str(next(self._numbers)))
        status = self._run(subject, here, {**vars(fault), "at": call}, self._planted)
        made = faulty.calls(self._log)
        where = f"{subject.name}, {name} at call {call}, after {made[-1].path.name if made else 'none'}"
        self._judge(subject, here, status, where, found)

    def attack_small(self, subject: Subject, here: Path, found: Found) -> int:
        """Let a command run into the end of the small file system that is mounted at a folder."""
        status = self._run(subject, here)
        self._judge(subject, here, status, f"{subject.name}, on a small file system", found, again=False)
        return status

    def judge_again(self, subject: Subject, here: Path, found: Found) -> None:
        """The same command, when there is room."""
        for each in self._again(subject, here):
            found.add(f"{subject.name}, on a small file system", each, is_fault=True)

    def _judge(
        self, subject: Subject, here: Path, status: int, where: str, found: Found, *, again: bool = True
    ) -> None:
        wrong = self._told_wrong(status) + subject.problems(here, self._ends[subject.name])
        outcome = "done in spite of it" if status == 0 else "one line"
        if status == 0 and not wrong:
            wrong = self._other(subject, here)
        if again and not wrong:
            wrong = self._again(subject, here)
        for each in wrong:
            found.add(where, each, is_fault=True)
        if not wrong:
            found.add(where, f"{subject.name}: {outcome}")

    def _told_wrong(self, status: int) -> list[str]:
        """What is wrong with the way a command ended."""
        told = self._told.read_text(errors="replace")
        lines = [line for line in told.splitlines() if line.startswith("polysketch: ")]
        if "Traceback" in told:
            return [f"traceback: {self._words()}"]
        if status == 0:
            return []
        return [] if status == 1 and len(lines) == 1 else [f"status {status} and {len(lines)} lines: {self._words()}"]

    def _again(self, subject: Subject, here: Path) -> list[str]:
        if not (subject.once and (here / subject.once).exists()):
            status = self._run(subject, here)
            if status:
                return [f"given again: status {status}: {self._words()}"]
        return self._other(subject, here)

    def _other(self, subject: Subject, here: Path) -> list[str]:
        """What differs from a command left alone."""
        try:
            seen = subject.seen(here)
        except (ValueError, OSError, KeyError) as error:
            return [f"in the end: {type(error).__name__}: {error}"]
        end = self._ends[subject.name]
        names = sorted(seen.keys() | end.keys())
        return [f"in the end {name} is another" for name in names if seen.get(name) != end.get(name)]

    def _run(
        self, subject: Subject, here: Path, fault: dict[str, int] | None = None, planted: Sequence[str] = ()
    ) -> int:
        faulty.forget(self._log)
        self._told.unlink(missing_ok=True)
        given = {"folder": str(here), "log": str(self._log), **(fault or {})}
        before = (*subject.before, *planted, "campaigns.faulty:arm")
        argv = subject.argv(self._folder / "given", here)
        return self._commands.run(Words(argv, self._told, before=before, given=given), _SECONDS)

    def _words(self) -> str:
        return " | ".join(self._told.read_text(errors="replace").splitlines()[-3:])


def small_file_systems(arena: Arena, subjects: Sequence[Subject], draw: random.Random, folder: Path) -> Iterator[Found]:
    """Commands on file systems of tens to hundreds of kilobytes, which get room afterwards."""
    for subject in subjects:
        found, place = Found(), folder / f"{subject.name}-mounted"
        place.mkdir()
        size = 4096 * draw.randrange(2, 200)
        if not _mount(place, f"size={size}"):
            found.add(subject.name, "left out: this machine mounts no small file system")
            yield found
            return
        try:
            here = place / "here"
            subject.begin(here)
            if arena.attack_small(subject, here, found):
                _mount(place, "remount,size=256m")
                arena.judge_again(subject, here, found)
        except OSError as error:  # not even room for what is there before
            found.add(subject.name, f"left out: {error.strerror}")
        finally:
            subprocess.run(["umount", str(place)], check=True)
        yield found


def _mount(place: Path, options: str) -> bool:
    try:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def campaign(count: int, seed: int, folder: Path, names: Sequence[str] = NAMES) -> Found:
    """So many faults of disks.

    Args:
        count: of them; all that there are where it is more.
        seed: of which.
        folder: an empty one.
        names: of `SUBJECTS`.
    """
    found, draw = Found(), random.Random(seed)
    if reason := why_none():
        found.add("all", f"left out: {reason}")
        return found
    subjects = {name: short(SUBJECTS[name]) for name in names}
    imports = tuple(dict.fromkeys(name for subject in subjects.values() for name in subject.imports))
    with serving(imports, preloaded(folder)) as commands:
        make_given(commands, folder / "given", {need for subject in subjects.values() for need in subject.needs})
        arena = Arena(commands, folder)
        every = [fault for subject in subjects.values() for fault in arena.faults(subject)]
        found.outcomes["faults that there are"] = len(every)
        for name, fault, call in every if count >= len(every) else draw.sample(every, count):
            arena.attack(subjects[name], fault, call, found)
        small = [subjects[name] for name in draw.sample(names, len(names) if count >= _MANY else 0)]
        for one in small_file_systems(arena, small, draw, folder):
            found.outcomes += one.outcomes
            found.faults += one.faults
    return found


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 600, argv, parts=NAMES)


if __name__ == "__main__":
    sys.exit(run())
