"""Tasks in several processes at once: most of a check's time is compiling and waiting for float64 on the CPU.

A process that hangs is ended, one that crashes is replaced; the task that did it has failed, and the others go on. No
task is begun after the section's end, and none goes on for long beyond it.
"""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO

from benchmarks import ROOT
from benchmarks.budget import Section
from benchmarks.checks.tasks import Record, Task
from benchmarks.checks.worker import MARK
from benchmarks.processes import end_group, last_lines

NO_TIME = "no time left in this section"

_LONGEST_TASK = 120.0  # seconds, with the start of a process
_GRACE = 20.0  # seconds beyond the section's end, for tasks begun before it
_MOST_CRASHES = 3  # in a row, without an answer: then it is not the tasks

Report = Callable[[Task, list[Record]], None]


def run_in_processes(
    tasks: list[Task], device: str, count: int, section: Section, report: Report, *, quick: bool
) -> list[tuple[Task, str]]:
    """Run tasks by `count` processes; `report` is called by several threads, one at a time.

    Returns:
        What was left out or could not be reported, with the reason.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    lock, left_out, workers = threading.Lock(), list[tuple[Task, str]](), list[_Worker]()

    def work() -> None:
        with contextlib.closing(_Worker([device, *(["quick"] if quick else [])])) as worker:
            workers.append(worker)
            while worker.crashes < _MOST_CRASHES and section.fits(2.0) and (number := _next(waiting)) is not None:
                try:
                    records = worker.run(number, tasks[number].name, section.deadline + _GRACE)
                    if records is None:
                        left_out.append((tasks[number], NO_TIME))
                        continue
                    with lock:
                        report(tasks[number], records)
                except Exception as error:  # noqa: BLE001 - the other tasks' answers are worth having
                    left_out.append((tasks[number], f"{type(error).__name__}: {error}"[:300]))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given_up = any(worker.crashes >= _MOST_CRASHES for worker in workers) and section.fits(2.0)
    reason = "processes crashed one after the other" if given_up else NO_TIME
    return [*left_out, *((tasks[number], reason) for number in iter(lambda: _next(waiting), None))]


def _next(waiting: "queue.SimpleQueue[int]") -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


class _Worker:
    """A process of `benchmarks.checks.worker`, started when it is needed.

    Attributes:
        crashes: of this process and those before it, since the last answer.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.crashes = 0
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it

    def command(self) -> list[str]:
        """What starts the process."""
        return [sys.executable, "-m", "benchmarks.checks.worker", *self._arguments]

    def run(self, number: int, name: str, deadline: float) -> list[Record] | None:
        """The records of a task; one that says so where the process crashed or took two minutes.

        Args:
            number: of the task.
            name: of the task.
            deadline: on the monotonic clock; None where it would have taken longer than that.
        """
        process, late = self._started(), threading.Event()
        seconds = max(1.0, min(_LONGEST_TASK, deadline - time.monotonic()))
        limit = threading.Timer(seconds, lambda: (late.set(), process.kill()))
        limit.start()
        try:
            answer = _ask(process, number)
        finally:
            limit.cancel()
        if answer is not None:
            self.crashes = 0
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)  # for its own status: its output was closed, or is about to be
        self._end()
        if late.is_set():
            return [_failed(name, f"its process was ended after {seconds:.0f} s")] if seconds == _LONGEST_TASK else None
        self.crashes += 1
        said = last_lines(self._errors)
        return [_failed(name, f"its process crashed with status {process.returncode}: {said or 'it said nothing'}")]

    def close(self) -> None:
        """End the process."""
        self._end()
        self._errors.close()

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process)
            with contextlib.suppress(OSError), self._process:  # closes its pipes
                pass
        self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(
                self.command(),
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        return self._process


def _failed(name: str, error: str) -> Record:
    return {"name": name, "passed": False, "error": error}


def _ask(process: "subprocess.Popen[str]", number: int) -> list[Record] | None:
    """One question and its answer; None where the process ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
    except OSError:
        return None
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return None
