"""A server as users start it: `polysketch serve` in a process of its own, and a run of random weights to serve."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import polysketch
from polysketch.data.description import DESCRIPTION_FILE, DataDescription, TokenizerDescription
from polysketch.data.tokenization import BytesTokenizer
from polysketch.models import TransformerLM
from polysketch.training.checkpoint import Checkpoint, save_checkpoint
from polysketch.training.run_folder import RunFolder

__all__ = ["ServerProcess", "never_ending", "serving", "write_run"]

_GRACE = 30  # seconds to stop

_SERVING = re.compile(r"serving .* at (http://\S+)")


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        address: http://HOST:PORT.
        process: that serves.
        log: file with what it wrote to standard error.
    """

    address: str
    process: subprocess.Popen
    log: Path

    @property
    def memory(self) -> int | None:
        """Bytes of main memory that it holds now; None where the system does not say."""
        return self._status("VmRSS")

    @property
    def most_memory(self) -> int | None:
        """Bytes that it held at most since the last `forget_most_memory`."""
        return self._status("VmHWM")

    def forget_most_memory(self) -> None:
        """Begin `most_memory` anew from what is held now, where the system can."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def cpu_seconds(self) -> float | None:
        """Seconds that processors have worked for it: other programs on the machine take none of them."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """Send SIGTERM and wait; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_GRACE)

    def _status(self, name: str) -> int | None:
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


@contextlib.contextmanager
def serving(
    run: Path,
    *flags: str,
    threads: int | None = None,
    token: str | None = None,
    program: Sequence[str] = ("-m", "polysketch"),
) -> Iterator[ServerProcess]:
    """`polysketch serve RUN` on a free port; it is stopped at the end, also by SIGTERM, if it still runs.

    Args:
        run: folder of a run.
        *flags: of the command, for instance "--concurrent", "64".
        threads: that it computes with; PyTorch's choice where None.
        token: that clients must send.
        program: what Python runs as the command `polysketch`.

    Raises:
        RuntimeError: it ended before it served; with its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *program, "serve", str(run), "--port", "0", "--engine", "builtin", *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(threads, token),
            )
        try:
            with _ended_by_sigterm():
                yield ServerProcess(_address(process, log), process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
            process.kill()
            process.communicate()


def write_run(folder: Path, model: TransformerLM) -> None:
    """Write a model as the run that it would be if it were trained on bytes: to be served, or loaded.

    Args:
        folder: of the run; made.
        model: whose vocabulary has at least the 257 ids of bytes; what it has beyond them stands for nothing.
    """
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True)
    run.tokenizer.mkdir()
    described = DataDescription(TokenizerDescription.of(BytesTokenizer()), "uint16", {})
    described.write(run.tokenizer / DESCRIPTION_FILE)
    run.write_config(
        {
            "training": {"context": 1, "extend": None},
            "resolved": {"dtype": "float32"},
            "model": model.config.to_dict(),
            "data": {"folder": "", "description_sha256": ""},
            "environment": {},
        }
    )
    save_checkpoint(run.checkpoints, Checkpoint(model.state_dict(), {}, {}, {"step": 0}), keep=1)


def never_ending(model: TransformerLM) -> TransformerLM:
    """The model, which from now on writes small letters alone: as many tokens as are asked for, each a character."""
    with torch.no_grad():
        model.output_bias.fill_(-1e4)
        model.output_bias[ord("a") : ord("z") + 1] = 0.0
    return model


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as an exception does, so that it leaves no server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread alone
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(threads: int | None, token: str | None) -> dict[str, str]:
    source = str(Path(polysketch.__file__).parents[1])  # also where the package is not installed
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    changes: dict[str, Any] = {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "POLYSKETCH_TOKEN": token or ""}
    if threads is not None:
        changes["OMP_NUM_THREADS"] = str(threads)
    return {**os.environ, **changes}


def _address(process: subprocess.Popen, log: Path) -> str:
    assert process.stdout is not None
    said: Sequence[str] = ()
    for line in process.stdout:
        said = [*said, line]
        if found := _SERVING.match(line):
            return found[1]
    last = log.read_text().strip().splitlines()[-1:] or [f"exit status {process.wait()}"]
    raise RuntimeError(f"the server did not start: {last[0]}")
