"""Chat templates, which are programs of whoever made a tokenizer, with a bound of time, memory and length."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.extras import require

__all__ = ["Template"]

SECONDS, MEMORY, LETTERS = 10.0, 1 << 30, 64_000_000
"""Of computing for one chat; bytes of a template's process; letters of a prompt."""

_PROCESS = Path(__file__).with_name("template_process.py")


class Template:
    """A template of Jinja in a process of its own, which starts with the first chat and goes on to the next ones.

    Loops without end, texts of terabytes and recursion end that process, and not this one. Windows has no limits of
    this kind: there the sandbox of Jinja and the length of the text are all.

    Args:
        source: the template.
        variables: that it may use beside `messages`, for instance special tokens; JSON.

    Raises:
        ImportError: the extra `serve` is missing.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        require("jinja2")
        limits = {"seconds": SECONDS, "memory": MEMORY, "letters": LETTERS}
        self._given = json.dumps({"template": source, "variables": dict(variables), **limits}, default=str)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end = lambda: None

    def render(self, messages: Any) -> str:
        """The text of messages, up to where the answer begins; threads take turns.

        Raises:
            ValueError: the template refuses these messages, or is beyond a bound.
        """
        with self._lock:
            try:
                found = self._ask(messages)
            except BaseException:  # of an interrupt, too: the answer would be taken for that of the next question
                self._end()
                raise
        if (excess := found.get("excess")) is not None:
            raise ValueError(f"expected a chat template that takes less, found that it {_EXCESS[excess]}")
        if (error := found.get("error")) is not None:
            raise ValueError(f"the chat template refuses these messages: {' '.join(error.split())}")
        return str(found["text"])

    def _ask(self, messages: Any) -> dict[str, str]:
        """The answer of the process; what ended it, where it ended."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(messages), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if line.endswith("\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        status = process.wait()
        self._end()
        if status == -getattr(signal, "SIGPROF", 0):
            return {"excess": "seconds"}
        return {"error": f"its process ended with status {status}"}

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-P", str(_PROCESS)]  # -P: modules beside the script are not Jinja's
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            self._end = weakref.finalize(self, _ended, self._process)
            assert self._process.stdin is not None
            print(self._given, file=self._process.stdin)
        return self._process


_EXCESS = {
    "seconds": f"computes for more than {SECONDS:.0f} seconds",
    "memory": f"takes more than {MEMORY >> 20} MiB of memory",
    "letters": f"makes more than {LETTERS:,} letters",
}


def _ended(process: subprocess.Popen[str]) -> None:
    """End it and forget it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
