"""Tasks in several processes at once: most of a check's time is compiling and waiting for float64 on the CPU.

A process that hangs is ended, one that crashes is replaced; the task that did it has failed, and the others go on.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT
from benchmarks.budget import Section
from benchmarks.checks.tasks import Record, Task
from benchmarks.checks.worker import MARK

_LONGEST_TASK = 120.0  # seconds, with the start of a process


def run_in_processes(
    tasks: list[Task],
    device: str,
    count: int,
    section: Section,
    report: Callable[[Task, list[Record]], None],
    *,
    quick: bool,
) -> list[Task]:
    """Run tasks by `count` processes; `report` is called by several threads, one at a time.

    Returns:
        What was left out for lack of time.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    lock, left_out = threading.Lock(), list[Task]()

    def work() -> None:
        worker = _Worker([device, *(["quick"] if quick else [])])
        while (number := _next(waiting)) is not None:
            if not section.fits(2.0):
                left_out.append(tasks[number])
                continue
            records = worker.run(number, tasks[number].name)
            with lock:
                report(tasks[number], records)
        worker.end()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return left_out


def _next(waiting: "queue.SimpleQueue[int]") -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


class _Worker:
    """A process of `benchmarks.checks.worker`, started when it is needed."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        """What starts the process."""
        return [sys.executable, "-m", "benchmarks.checks.worker", *self._arguments]

    def run(self, number: int, name: str) -> list[Record]:
        """The records of a task; one that says so where the process crashed or hung."""
        process = self._started()
        limit = threading.Timer(_LONGEST_TASK, process.kill)
        limit.start()
        try:
            answer = _ask(process, number)
        finally:
            limit.cancel()
        if answer is None:
            self.end()
            return [{"name": name, "passed": False, "error": "its process crashed, or took longer than two minutes"}]
        return answer

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError), self._process:  # closes its pipes
                pass
        self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(self.command(), cwd=ROOT, text=True, **pipes)
        return self._process


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
