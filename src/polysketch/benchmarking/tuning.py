"""Choose the constants of the Triton programs by timing them: what `polysketch benchmark tune` does.

For each call, forward and backward apart, each program that it launches is tried with constants near those in use, one
program after the other. A candidate that does not compile, spills registers, takes too much shared memory or gives
another result is not timed, and those that are timed take turns. What is faster is kept as an entry of the program's
file of configurations, for calls with the same properties: never for a length.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.benchmarking.program_calls import ProgramCall
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.tuning_candidates import Configuration, Question, candidates, questions_asked
from polysketch.benchmarking.workbench import save
from polysketch.ops.triton import forced
from polysketch.ops.triton.configurations import forget_tuned
from polysketch.ops.triton.launch import launching
from polysketch.ops.triton.provenance import provenance
from polysketch.ops.triton.tuned import FOUND_WITH

__all__ = ["Tuning", "tune", "write_entries"]

_REPEATS = 5
_WORTH = 0.97  # a candidate must take less than this share of the time: what is less is noise
_TOLERANCES = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-3}
_BATCH, _HEADS, _LENGTH = 4, 8, 8_192

Function = Callable[[], Sequence[Tensor]]


@dataclass
class Tuning:
    """How to tune.

    Attributes:
        clock: of the device.
        generation: of the device, as the files of configurations name it: sm_90.
        file_of: program -> the file that its entries go to.
        programs: names of those to tune; all where there are none.
        deadline: on the monotonic clock.
        say: is told how far it is.
        sizes: batch, heads and length of the calls.
    """

    clock: Clock
    generation: str
    file_of: Callable[[str], Path]
    programs: tuple[str, ...] = ()
    deadline: float = float("inf")
    say: Callable[[str], None] = lambda _: None
    sizes: tuple[int, int, int] = (_BATCH, _HEADS, _LENGTH)
    started: float = field(default_factory=time.monotonic)


def tune(calls: Sequence[ProgramCall], how: Tuning) -> dict[str, list[dict[str, Any]]]:
    """Tune the programs of all calls, as far as time allows; each winner is written as soon as it is known.

    Returns:
        Program -> the entries found, in the form of the files of configurations.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    tuned: set[tuple] = set()
    for number, call in enumerate(calls):
        if time.monotonic() > how.deadline:
            how.say(f"no time left for {len(calls) - number} of {len(calls)} calls, the first of them {call.name}")
            break
        for program, entries in _tune_call(call, how, tuned):
            found_with = provenance(program, how.clock.device)
            entries = [{**entry, FOUND_WITH: found_with} for entry in entries]
            write_entries(how.file_of(program), how.generation, entries)
            found.setdefault(program, []).extend(entries)
        how.say(f"{number + 1}/{len(calls)} {call.name}, {call.dtype}; {_time_left(how, number + 1, len(calls))}")
    return found


def write_entries(path: Path, generation: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put entries before those that a file has, in the place of those for the same calls on the same device."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    replaced = [_place(entry) for entry in entries]
    kept = [entry for entry in before.get(generation, []) if _place(entry) not in replaced]
    save({**before, generation: [*entries, *kept]}, path)
    forget_tuned()


def _place(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry["where"], entry.get(FOUND_WITH, {}).get("device")


def _time_left(how: Tuning, done: int, of: int) -> str:
    now = time.monotonic()
    left = min((now - how.started) / done * (of - done), how.deadline - now)
    return f"{max(0.0, left) / 60:.0f} min left"


@dataclass(frozen=True)
class _Pass:
    """A pass of a call, forward or backward.

    Attributes:
        title: for what is said.
        function: computes it.
        timed: what to time.
        tolerance: of a candidate's results.
    """

    title: str
    function: Function
    timed: Function
    tolerance: float


def _tune_call(call: ProgramCall, how: Tuning, tuned: set[tuple]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Forward, then backward: each program of a pass on its own, the others as they were found best."""
    chosen: dict[str, Configuration] = {}
    for one in _passes(call, how):
        with questions_asked() as questions:
            in_use = _attempted(one.function)
        for group in _by_program(questions, how, tuned):
            program = group[0].program
            right = list(_right(one, in_use, group[0], chosen, how.deadline))
            best = _fastest(one, group[0], right, chosen, how) if right else None
            if best is not None:
                chosen[program] = best
                yield program, [{"where": question.properties, "use": best} for question in group]


def _passes(call: ProgramCall, how: Tuning) -> Iterator[_Pass]:
    """The passes; what is made in between is made once."""
    made, tolerance = call.build(how.clock.device, *how.sizes), _TOLERANCES[call.dtype]
    forward = torch.no_grad()(lambda: (made.function(),))
    yield _Pass("forward", forward, torch.no_grad()(lambda: ((made.timed or made.function)(),)), tolerance)
    if not call.differentiable:
        return
    leaves = [leaf.requires_grad_() for leaf in made.leaves]
    output = made.function()
    cotangent = torch.randn_like(output)

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(output, leaves, cotangent, retain_graph=True)

    yield _Pass("backward", backward, backward, tolerance)


def _by_program(questions: Sequence[Question], how: Tuning, tuned: set[tuple]) -> list[list[Question]]:
    """New questions, those about one program together: it gets the same answer for all of them."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        if question.key in tuned or (how.programs and question.program not in how.programs):
            continue
        tuned.add(question.key)
        groups.setdefault(question.program, []).append(question)
    return list(groups.values())


def _right(
    one: _Pass, in_use: "_Attempt", question: Question, chosen: Mapping[str, Configuration], deadline: float
) -> Iterator[Configuration]:
    """Candidates that compile, run, spill no more, and give what the configuration in use gives."""
    for candidate in candidates(question.use):
        if time.monotonic() > deadline:
            return
        try:
            found = _attempted(_with(one.function, {**chosen, question.program: candidate}))
        except Exception:  # noqa: BLE001 - whatever Triton raises for constants that do not fit: it is out
            continue
        far = max(map(_distance, found.results, in_use.results))
        if found.spilled <= in_use.spilled and far <= one.tolerance:
            yield candidate


def _fastest(
    one: _Pass,
    question: Question,
    right: Sequence[Configuration],
    chosen: Mapping[str, Configuration],
    how: Tuning,
) -> Configuration | None:
    """The fastest of some configurations of a program; None where nothing is faster than the one in use."""
    program, base = question.program, json.dumps(question.use)
    ways = [question.use, *right]
    functions = {json.dumps(use): _with(one.timed, {**chosen, program: use}) for use in ways}
    seconds = how.clock.alternate(functions, repeats=_REPEATS)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    before, best = medians.pop(base), min(medians, key=medians.__getitem__)
    won = medians[best] < _WORTH * before
    how.say(
        f"  {program}, {one.title}: {before * 1e3:.3f} ms -> {min(before, medians[best]) * 1e3:.3f} ms with "
        f"{best if won else 'what is in use'} ({len(right)} of {len(candidates(question.use))} right)"
    )
    return json.loads(best) if won else None


def _with(function: Function, configurations: Mapping[str, Configuration]) -> Function:
    """The function with some programs' constants given."""

    def call() -> Sequence[Tensor]:
        with forced(**configurations):
            return function()

    return call


class _Attempt(NamedTuple):
    """What a call gives, and how many bytes of registers its programs spill."""

    results: Sequence[Tensor]
    spilled: int


def _attempted(function: Function) -> _Attempt:
    spilled = [0]

    def run(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        spilled[0] += kernel[(programs,)](*arguments, **options).n_spills

    with launching(run):
        results = function()
    return _Attempt(results, spilled[0])


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative, on the device; infinite where anything is not finite."""
    found, expected = found.float(), expected.float()
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
    return distance if math.isfinite(distance) else math.inf
