"""What the tests of training share: a little data, options for runs of a second, and a disk that fails on demand."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from polysketch.data import ReadOptions, prepare
from polysketch.storage import disk as operations
from polysketch.training import TrainingConfig, saving, trainer
from polysketch.training.checkpoint import load_checkpoint
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder

TIMES = ("seconds", "tokens_per_second")


class Killed(BaseException):
    """Stands for the end of the process: no `except` of the code under test may catch it."""


class Disk:
    """Takes the place of the operations in `polysketch.storage.disk`: counts them, and fails one of them.

    After a kill all operations of all threads fail, until `restart`.

    Attributes:
        log: (operation, paths) of every operation so far.
        fail_at: index in the log of the operation to fail, or None.
        error: what to raise there.
        torn: whether a failing write leaves half of its data.
    """

    Killed = Killed
    OPERATIONS = ("write", "append", "sync", "rename", "make_folder", "delete", "delete_folder")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, tuple[Path, ...]]] = []
        self.fail_at: int | None = None
        self.error: Callable[[Path], BaseException] = lambda path: Killed()
        self.torn = False
        self._dead = False
        self._one_at_a_time = threading.Lock()
        self._unsynced: set[Path] = set()
        self._renamed: list[tuple[Path, Path, bytes | None]] = []
        for name in self.OPERATIONS:
            monkeypatch.setattr(operations, name, self._wrap(name, getattr(operations, name)))

    def _wrap(self, name: str, operation: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: Any) -> None:
            with self._one_at_a_time:
                self._do(name, operation, arguments)

        return wrapped

    def _do(self, name: str, operation: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        paths = tuple(argument for argument in arguments if isinstance(argument, Path))
        if self._dead:
            raise Killed
        if self.fail_at == len(self.log):
            if self.torn and name == "write":
                operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
            self.fail_at = None
            error = self.error(paths[0])
            self._dead = isinstance(error, Killed)
            raise error
        self.log.append((name, paths))
        replaced = paths[1].read_bytes() if name == "rename" and paths[1].is_file() else None
        operation(*arguments)
        self._remember(name, paths, replaced)

    def _remember(self, name: str, paths: tuple[Path, ...], replaced: bytes | None) -> None:
        if name == "write":
            self._unsynced.add(paths[0])
        if name == "rename":
            self._renamed.append((paths[0], paths[1], replaced))
            self._unsynced = {self._moved(path, *paths) for path in self._unsynced}
        if name == "sync":
            self._unsynced.discard(paths[0])
            self._renamed = [done for done in self._renamed if done[1].parent != paths[0]]

    @staticmethod
    def _moved(path: Path, source: Path, target: Path) -> Path:
        return target / path.relative_to(source) if path.is_relative_to(source) else path

    def cut_power(self) -> None:
        """Take back what was not synced: contents become empty, new names are undone."""
        for path in self._unsynced:
            if path.exists():
                path.write_bytes(b"")
        for source, target, replaced in reversed(self._renamed):
            if target.exists() and not source.exists():
                target.rename(source)
                if replaced is not None:
                    target.write_bytes(replaced)

    def restart(self) -> None:
        """Forget everything and fail no more."""
        self._dead = False
        self.log.clear()
        self.fail_at = None
        self._unsynced.clear()
        self._renamed.clear()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No waiting for the disk (`Disk` keeps the books on what was synced), and no plots but where they are tested."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    if "plotting" not in request.fixturenames:
        monkeypatch.setattr(trainer, "plot_loss", lambda lines, path: False)


@pytest.fixture
def plotting() -> None:
    """Ask for the plots to be made."""
    pytest.importorskip("matplotlib")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that counts the operations of training and can fail one."""
    return Disk(monkeypatch)


def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = saving.in_background

    def now(work: Callable[[], None]) -> "Future[None]":
        done = begin(work)
        done.exception()
        return done

    monkeypatch.setattr(saving, "in_background", now)


def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, wait = saving.in_background, saving.Saver._await_end

    def held(work: Callable[[], None]) -> "Future[None]":
        def work_when_awaited() -> None:
            assert awaited.wait(60)
            work()

        awaited.clear()
        return begin(work_when_awaited)

    def let_go(self: saving.Saver) -> None:
        awaited.set()
        wait(self)

    awaited = threading.Event()
    monkeypatch.setattr(saving, "in_background", held)
    monkeypatch.setattr(saving.Saver, "_await_end", let_go)


SPEEDS = {"at once": _at_once, "late": _late, "beside": lambda monkeypatch: None}
"""When a checkpoint is written: before the next step begins, when somebody waits for it, or as it happens."""


@pytest.fixture
def speed_of_writing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """When checkpoints are written, a name of `SPEEDS`, by indirect parametrisation."""
    SPEEDS[request.param](monkeypatch)
    return request.param


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 20 kB of text, prepared as bytes."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        lines = (f"{left} plus {number} is {left + number}." for left in range(100))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    whole = ReadOptions(cut_text=0)
    prepare(
        folder, "bytes", folder.parent / "data", validation_share=0.2, test_share=0.1, options=whole, progress=False
    )
    return folder.parent / "data"


@pytest.fixture
def make_config(data_folder: Path, tmp_path: Path) -> Callable[..., TrainingConfig]:
    """A function that gives the options of a run of about a second, with changes."""

    def make(**changes: Any) -> TrainingConfig:
        options: dict[str, Any] = {
            "data": data_folder,
            "out": tmp_path / "run",
            "layers": 1,
            "attention": "polysketch-paper",
            "attention_options": {"sketch_size": 8, "local_chunk": 16, "prefix_gain": 0.5},
            "context": 64,
            "batch_size": 2,
            "steps": 6,
            "log_every": 1,
            "eval_every": 4,
            "eval_tokens": 100,
            "save_every": 2,
            "device": "cpu",
            "tensorboard": False,
        }
        return TrainingConfig(**options | changes)

    return make


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], dict[str, Any]]:
    """A function that gives what a finished run amounts to: its metrics but for times, and its last checkpoint."""

    def read(folder: Path) -> dict[str, Any]:
        run = RunFolder(folder)
        lines = MetricsFile(run.metrics).read()
        checkpoint = load_checkpoint(sorted(run.checkpoints.glob("step-*"))[-1])
        return {
            "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
            "tensors": {**checkpoint.model, **checkpoint.optimizer, **checkpoint.random},
            "step": checkpoint.state["step"],
        }

    return read


@pytest.fixture(scope="session")
def assert_same_outcome(outcome: Callable[[Path], dict[str, Any]]) -> Callable[[Path, Path], None]:
    """A function that asserts that two runs ended bit for bit alike."""

    def check(found_folder: Path, expected_folder: Path) -> None:
        found, expected = outcome(found_folder), outcome(expected_folder)
        assert found["step"] == expected["step"]
        assert found["metrics"] == expected["metrics"]
        assert found["tensors"].keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            assert torch.equal(found["tensors"][name], tensor), name

    return check
