"""Inputs guided by coverage for every reader of outside bytes: each is read, or refused in one line.

    python -m campaigns.guided --count 20000 --seed 0
    python -m campaigns.guided --count 1000 --only "metrics.jsonl" "a state"

`--count` is of inputs for each target (`guided_targets.py`); those that read slowly get fewer. libFuzzer,
by the package atheris, begins with whole files and keeps what reaches new branches of polysketch. What is changed is
bytes, or values, names and depths of JSON (`mutations.py`). It never gives control back and ends with a crash, so each
target has a process of its own: a fork of one that has imported everything (`guided_target.py`).

What is a fault: an error that no command explains, a signal, a hang, more memory than the bound, and a refusal that
says no more than Python does. The first input of each place is kept in `build/guided`; the record has the command that
reads it again. The record says what was covered, too: branches and features (branches with how often they were taken,
and comparisons) after the whole files, and at the end.
"""

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.guided_target import COUNTED, ENDED, FAULT
from campaigns.guided_targets import TARGETS, example, make, target_of
from campaigns.harness import Found, main
from polysketch.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "guided"
MISSING = "the package 'atheris' is needed here and not installed: pip install 'polysketch[fuzz]', on Linux"
_MEGABYTES = 4096  # of resident memory
_NEVER = 10**6  # seconds: `guided_target` has a bound of its own
_LONGEST = 8192  # letters of an input, or twice the whole files
_COVERED = re.compile(r"#\d+\s+(\w+)\s+cov: (\d+) ft: (\d+)")


@dataclass
class Told:
    """What libFuzzer tells of one target.

    Attributes:
        outcomes: inputs by what came of them.
        faults: in words.
        first: branches and features after the whole files.
        last: the newest numbers of these.
        lines: the last ones.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0, 0])
    last: list[int] = field(default_factory=lambda: [0, 0])
    lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=30))

    def hear(self, line: str, name: str, progress: Progress) -> None:
        """Take a line in."""
        self.lines.append(line)
        if line.startswith(FAULT):
            fault = json.loads(line.removeprefix(FAULT))
            self.faults.append(f"{name}: {fault['place']}: {fault['wrong']}: {_again(name, fault['path'])}")
            progress.say(self.faults[-1])
        elif line.startswith(COUNTED):
            self.outcomes = json.loads(line.removeprefix(COUNTED))
            progress.update(sum(self.outcomes.values()))
        elif (told := _COVERED.match(line)) is not None:
            self.last = [int(told[2]), int(told[3])]
            if told[1] == "INITED":
                self.first = self.last

    def figures(self) -> dict[str, Any]:
        """For the record: of what was covered the number after the whole files, and at the end."""
        branches, features = zip(self.first, self.last, strict=True)
        return {
            "inputs": sum(self.outcomes.values()),
            "faults": len(self.faults),
            "branches": branches,
            "features": features,
        }


def campaign(count: int, seed: int, folder: Path, names: Sequence[str] = tuple(TARGETS), kept: Path = KEPT) -> Found:
    """So many inputs for each target; what shows a fault stays in the folder `kept`."""
    works = [_work(name, count, seed, make(folder, name), kept) for name in names]
    command = [sys.executable, "-m", "campaigns.guided_target"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    found, left, told = Found(), list(names), Told()
    with subprocess.Popen(command, **pipes, text=True, errors="replace", cwd=ROOT, env=_environment()) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        json.dump(works, process.stdin)
        process.stdin.close()
        progress = _progress(left, count)
        for line in process.stderr:
            if not line.startswith(ENDED):
                told.hear(line, left[0], progress)
                continue
            progress.close()
            _add(found, told, left.pop(0), **json.loads(line.removeprefix(ENDED)))
            told, progress = Told(), _progress(left, count)
    if left:
        found.faults.append(f"{left[0]}: the process that forks ended with status {process.returncode}: {_end(told)}")
    return found


def _progress(left: Sequence[str], count: int) -> Progress:
    """Of the target that is next."""
    return Progress(left[0], max(1, count // target_of(left[0]).cost), "inputs") if left else Progress()


def _add(found: Found, told: Told, name: str, status: int, seconds: int, path: str) -> None:
    """What came of a target."""
    if status:
        told.faults.append(f"{name}: ended with status {status}: {_end(told)}: {_again(name, path)}")
    found.faults += told.faults
    found.outcomes.update(told.outcomes)
    found.figures[name] = {**told.figures(), "seconds": seconds}
    print(f"{name}: {json.dumps(found.figures[name])}", file=sys.stderr, flush=True)


def _end(told: Told) -> str:
    """What libFuzzer says of a signal, a hang or too much memory; the last lines where it says no such thing."""
    said = [line.strip() for line in told.lines if "ERROR" in line or "Error" in line or "Timeout" in line]
    return " | ".join(said or [line.strip() for line in told.lines if line.strip()][-3:])[-400:]


def _work(name: str, count: int, seed: int, whole: Path, kept: Path) -> dict[str, Any]:
    """What `guided_target` is to do for a target."""
    target, corpus, place = target_of(name), whole.with_name("corpus"), kept / whole.parent.name
    content = example(target, whole)
    place.mkdir(parents=True, exist_ok=True)
    corpus.mkdir()
    (corpus / "whole").write_bytes(content)
    options = {
        "runs": max(1, count // target.cost),
        "seed": seed + 1,  # 0 is any
        "timeout": _NEVER,
        "rss_limit_mb": _MEGABYTES,
        "max_len": max(_LONGEST, 2 * len(content)),
        "artifact_prefix": f"{corpus.parent}/",
    }
    said = [str(corpus), *(f"-{option}={value}" for option, value in options.items())]
    return {"name": name, "folder": str(whole), "kept": str(place), "options": said}


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    one = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **one, "PYTHONPATH": path}


def _again(name: str, path: str) -> str:
    """The command that reads an input again."""
    return f'python -m campaigns.guided_target "{name}" {path}'


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    if importlib.util.find_spec("atheris") is None:
        print(MISSING, file=sys.stderr)
        return 2
    return main(campaign, __doc__, 2000, argv, parts=tuple(TARGETS))


if __name__ == "__main__":
    sys.exit(run())
