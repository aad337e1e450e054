"""One target of guided fuzzing: an input that was kept is read again, or atheris makes inputs for it.

    python -m campaigns.guided_target "metrics.jsonl" build/guided/metrics-jsonl/fault-0123456789ab

This needs no atheris. It prints what comes of the input, and ends with status 1 where that is a fault. Without words
it takes the targets that are to be fuzzed from standard input, as `campaigns.guided` does it. Nothing of polysketch is
imported before atheris is there to instrument it.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import importlib
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from campaigns.guided_targets import Target

FAULT, COUNTED, ENDED = "FAULT ", "COUNTED ", "ENDED "
"""How lines begin that `campaigns.guided` reads; JSON follows."""

NOW = "now"
"""The file of the input that is read, beside the folder of whole files."""

MEMORY = 2 << 30
"""Bytes of address space that reading may take beyond what the process has at first."""

_NOT_INSTRUMENTED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "safetensors.torch", "tokenizers", "tyro")
_INPUTS = 50  # between two looks at the clock


def judged(read: Callable[[], Any]) -> tuple[str, str | None, str]:
    """What came of reading: "read", or the refusal in a line; what is wrong with that; and the place of the error."""
    from campaigns.isolated import complaint, in_this_process

    ended, error = in_this_process(read)
    return ended.text.strip() if ended.status else "read", complaint(ended), "" if error is None else _place(error)


def _place(error: BaseException) -> str:
    """The kind of an error, and the last line of ours that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "polysketch" in frame.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere"
    return f"{type(error).__name__} at {where}"


def read_again(name: str, path: Path) -> int:
    """Read an input that was kept, and say what comes of it."""
    from campaigns.guided_targets import make, read_input, target_of

    with tempfile.TemporaryDirectory() as folder:
        target, whole = target_of(name), make(Path(folder), name)
        outcome, wrong, _ = judged(lambda: read_input(target, whole, path.read_bytes()))
    print(f"{wrong}\n{outcome}" if wrong else outcome)
    return 1 if wrong else 0


class Reading:
    """Reads one input after another, counts what came of them, and keeps the first input of each fault.

    One that takes too long ends the process. The bound of atheris is none: it raises an error, which readers catch.

    Args:
        target: what reads.
        folder: of whole files; beside it stands the input that is read now.
        kept: folder for inputs.
        count: of inputs, after which the counts are told once more.
    """

    def __init__(self, target: "Target", folder: Path, kept: Path, count: int) -> None:
        self._target, self._folder, self._kept, self._count = target, folder, kept, count
        self._outcomes: Counter[str] = Counter()
        self._places: set[str] = set()
        self._now = folder.with_name(NOW)
        self._told = time.monotonic()

    def __call__(self, content: bytes) -> None:
        """Read one."""
        from campaigns.guided_targets import read_input

        self._now.write_bytes(content)
        faulthandler.dump_traceback_later(self._target.seconds, exit=True)
        outcome, wrong, place = judged(lambda: read_input(self._target, self._folder, content))
        faulthandler.cancel_dump_traceback_later()
        self._outcomes["fault" if wrong else "read" if outcome == "read" else "refused"] += 1
        if wrong and place not in self._places:
            self._places.add(place)
            _tell(FAULT, {"place": place, "wrong": wrong, "path": _keep(content, self._kept)})
        self._count_aloud()

    def _count_aloud(self) -> None:
        done = self._outcomes.total()
        if done >= self._count or (done % _INPUTS == 0 and time.monotonic() > self._told + 1):
            self._told = time.monotonic()
            _tell(COUNTED, dict(self._outcomes))


def _keep(content: bytes, folder: Path) -> str:
    """Keep an input that shows a fault; where."""
    path = folder / f"fault-{hashlib.sha256(content).hexdigest()[:12]}"
    path.write_bytes(content)
    return str(path)


def _tell(kind: str, values: dict[str, Any]) -> None:
    print(f"\n{kind}{json.dumps(values)}", file=sys.__stderr__, flush=True)


def fuzz(works: Sequence[Mapping[str, Any]]) -> None:
    """Let libFuzzer make inputs for one target after the other, each in a fork of this process, which it ends.

    Args:
        works: of each target the `name`, the `folder` of whole files, the folder `kept` for inputs that show a fault,
            and `options` of libFuzzer, `-runs=` among them.
    """
    import atheris

    for module in _NOT_INSTRUMENTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    names = [work["name"] for work in works]
    with atheris.instrument_imports(include=["polysketch", *{name.split(":")[0] for name in names if ":" in name}]):
        from campaigns.guided_targets import target_of

        for late in (module for name in names for module in target_of(name).late):
            importlib.import_module(late)
    for work in works:
        started, process = time.monotonic(), os.fork()
        if process == 0:
            _fuzz_here(**work)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        now = Path(work["folder"]).with_name(NOW)
        path = _keep(now.read_bytes(), Path(work["kept"])) if status and now.exists() else ""
        _tell(ENDED, {"status": status, "seconds": round(time.monotonic() - started), "path": path})


def _fuzz_here(name: str, folder: str, kept: str, options: Sequence[str]) -> NoReturn:
    """Let libFuzzer make inputs for a target, and end."""
    import atheris

    try:
        with atheris.instrument_imports(include=["polysketch"]):
            from campaigns.guided_targets import changed, example, read_input, target_of
            from campaigns.isolated import address_space

            target = target_of(name)
            read_input(target, Path(folder), example(target, Path(folder)))  # what it imports late is instrumented too
        (runs,) = (int(option.removeprefix("-runs=")) for option in options if option.startswith("-runs="))

        def mutate(content: bytes, most: int, seed: int) -> bytes:
            new = changed(target, content, random.Random(seed), lambda part: atheris.Mutate(part, len(part) + 64))
            return new if len(new) <= most else atheris.Mutate(content, most)

        limit = address_space() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        atheris.Setup(["guided", *options], Reading(target, Path(folder), Path(kept), runs), custom_mutator=mutate)
        atheris.Fuzz()
    except BaseException:  # noqa: BLE001 - it is told, and must not go on as the process that forks
        traceback.print_exc()
    finally:
        os._exit(99)


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", help="of a target of campaigns.guided, or MODULE:NAME")
    parser.add_argument("input", nargs="?", type=Path, help="a file that was kept")
    given = parser.parse_args(argv)
    if given.name is None:
        fuzz(json.load(sys.stdin))
        return 0
    if given.input is None:
        parser.error("expected a file that was kept, found none")
    return read_again(given.name, given.input)


if __name__ == "__main__":
    sys.exit(run())
