"""Commands in processes that start in milliseconds: forked from a server that has imported PyTorch once.

The server computes nothing, so that a fork copies no pool of threads and no lock that somebody holds. What runs in a
fork is the command `polysketch` with the words of its command line; `fresh=True` starts it by Python anew instead, as a
user does.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

TEXT = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.fsdp",
    "safetensors.torch",
    "polysketch.cli.train",
    "polysketch.training",
    "polysketch.plotting",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)
"""What commands on text need; enough for training."""

ALL = (*TEXT, "polysketch.conversion", "polysketch.integrations.huggingface", "polysketch.studies.study")
"""What every command of the campaigns needs."""

_ROOT = Path(__file__).resolve().parents[1]
_POLL = 0.002


@dataclass(frozen=True)
class Words:
    """What a process is to do.

    Attributes:
        argv: the command line after `polysketch`; without one, the functions `before` are all.
        told: file for what it writes on stdout and stderr.
        environment: added to that of the server.
        before: functions to call first, `module:function`; faults are planted so, and disks made to fail.
        given: what the last of these is called with; JSON.
        fresh: whether Python starts anew, as it does for a user; nothing can be called before.
    """

    argv: Sequence[str]
    told: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False


class Commands:
    """A server of processes; made by `serving`."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def start(self, words: Words) -> int:
        """Start a process and return its id, which stays its own until `wait` has returned its status."""
        values = {**vars(words), "argv": list(words.argv), "told": str(words.told), "before": list(words.before)}
        return int(self._ask(start={**values, "environment": dict(words.environment), "given": dict(words.given)}))

    def wait(self, process: int, seconds: float) -> int | None:
        """The exit status, minus the signal's number where one ended it; None if it goes on for so long."""
        return self._ask(wait=process, seconds=seconds)

    def run(self, words: Words, seconds: float = 300.0) -> int:
        """Start a process and wait for its end; one that takes too long is killed.

        Raises:
            TimeoutError: it was.
        """
        process = self.start(words)
        status = self.wait(process, seconds)
        if status is None:
            os.kill(process, signal.SIGKILL)
            self.wait(process, seconds)
            raise TimeoutError(f"polysketch {' '.join(words.argv)}: still at work after {seconds:.0f} seconds")
        return status

    def _ask(self, **question: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextlib.contextmanager
def serving(imports: Sequence[str] = ALL, environment: Mapping[str, str] | None = None) -> Iterator[Commands]:
    """Start a server of processes with one thread each.

    Args:
        imports: modules that it has when it forks.
        environment: of the processes, besides this one's.
    """
    path = os.pathsep.join(filter(None, (str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH"))))
    one = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    server = subprocess.Popen(
        [sys.executable, "-m", "campaigns.forked", *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, **one, "PYTHONPATH": path, **(environment or {})},
    )
    with server:
        try:
            yield Commands(server)
        finally:
            assert server.stdin is not None
            server.stdin.close()


def _serve(imports: Sequence[str]) -> None:
    """Answer questions until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # else a collection copies what a child shares with this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a child prints before its own file is there is no answer
    for line in sys.stdin:
        question = json.loads(line)
        found = _forked(question["start"]) if "start" in question else _awaited(question["wait"], question["seconds"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _awaited(process: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL)


def _forked(words: Mapping[str, Any]) -> int:
    process = os.fork()
    if process == 0:
        _become(words)
    return process


def _become(words: Mapping[str, Any]) -> NoReturn:
    """Run the command in this process, which is a new one."""
    status = 70
    try:
        os.setsid()
        _redirect(words["told"])
        os.environ.update(words["environment"])
        if words["fresh"]:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "polysketch", *words["argv"]])
        for name in words["before"]:
            module, _, function = name.partition(":")
            getattr(importlib.import_module(module), function)(
                **(words["given"] if name == words["before"][-1] else {})
            )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from polysketch.cli import main

        status = main(words["argv"]) if words["argv"] else 0
    except KeyboardInterrupt:
        status = 130
    except BaseException:  # noqa: BLE001  (as Python does at the end of a process)
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # of a second Ctrl-C, which comes when all is done
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(told: str) -> None:
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)


if __name__ == "__main__":
    _serve(sys.argv[1:])
