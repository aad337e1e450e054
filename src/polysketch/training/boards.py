"""Where metrics are shown beside their file: TensorBoard, Weights & Biases, Trackio.

A board gets every line of metrics. It never decides over the run: one that fails while the run goes on is left out
from then on, with a note.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from polysketch.extras import require

_NOT_SHOWN = ("kind", "step")

TRACKERS = Literal["none", "wandb", "trackio"]
"""Packages with the functions `init`, `log` and `finish` of wandb."""


class Board(Protocol):
    """A place where the metrics of a run are shown."""

    name: str

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of metrics."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Writes lines of metrics as TensorBoard scalars.

    Args:
        folder: where its files go.
        first_step: what earlier processes wrote about later steps is hidden.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, first_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TensorBoard's own imports warn of deprecations that no user can act on
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of metrics."""
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Tracker:
    """Sends lines of metrics to Weights & Biases, or to Trackio, which has the same functions.

    Where the run goes on after a stop, the tracker's run goes on. Steps that are made again, after a kill, are those
    that it has already; wandb drops them, Trackio shows them twice.

    Args:
        name: a package of `TRACKERS`. Where it sends to is its own affair: WANDB_MODE=offline, for instance.
        project: the tracker's project.
        run: name of the run in it.
        identity: what tells the run from others, as `LoopFolder.identity` has it.
        config: the options of the run.

    Raises:
        ImportError: the package is not installed.
        RuntimeError: it could not begin; with its own message.
    """

    def __init__(self, name: str, *, project: str, run: str, identity: str, config: Mapping[str, Any]) -> None:
        self.name = name
        # Trackio finds a run by its name alone.
        known_by = {"id": identity[:32], "name": run} if name == "wandb" else {"name": f"{run}-{identity[:8]}"}
        try:
            self._run = require(name).init(project=project, config=dict(config), resume="allow", **known_by)
        except ImportError:
            raise
        except Exception as error:
            raise RuntimeError(f"--tracker {name}: it could not begin: {_one_line(error)}") from error

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of metrics."""
        self._run.log(scalars(line), step=line["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Boards:
    """Several boards. One that fails is left out from then on: the metrics are in their file all the same.

    Args:
        boards: open ones.
        say: told of a failure, in a line.
    """

    def __init__(self, boards: Iterator[Board], say: Callable[[str], None]) -> None:
        self._boards = list(boards)
        self._say = say

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line of metrics to each."""
        for board in list(self._boards):
            self._attempt(board, functools.partial(board.add, line))

    def close(self) -> None:
        """Close each."""
        for board in list(self._boards):
            self._attempt(board, board.close)

    def _attempt(self, board: Board, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises, the run is worth more)
            self._boards.remove(board)
            self._say(f"note: {board.name} failed, and gets no more metrics of this process: {_one_line(error)}")


def tensorboard_is_installed() -> bool:
    """Whether there is a package that writes TensorBoard's files."""
    return importlib.util.find_spec("tensorboard") is not None


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics, by `KIND/NAME`; of the prefix's shares, the mean over the heads of a layer."""
    return {f"{line['kind']}/{name}": value for name, value in _scalars(line)}


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/layer {key}", sum(heads) / len(heads)) for key, heads in value.items())
        elif name not in _NOT_SHOWN and value is not None:
            yield name, value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
