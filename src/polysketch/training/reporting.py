"""What a run tells: metrics.jsonl, boards, the terminal, and the plot of the loss."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from polysketch import plotting, progress
from polysketch.training.boards import Board, Boards
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import LoopFolder

_SMOOTHED = 20
_SECONDS_TO_KNOW_THE_SPEED = 20.0
_LONG = 30 * 60.0  # seconds


class Reporter:
    """All that a run tells while it goes on.

    Args:
        folder: of the run.
        steps: steps of the whole run.
        show: whether to write on stderr.
        boards: opens, for the number of steps made already, the boards that get the metrics too.
    """

    def __init__(
        self, folder: LoopFolder, steps: int, *, show: bool, boards: Callable[[int], Iterator[Board]] | None = None
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._show = show
        self._open_boards = boards or (lambda step: iter(()))
        self._progress = Progress(0, steps, enabled=show)
        self._boards = Boards(iter(()), self.say)

    @functools.cached_property
    def metrics(self) -> MetricsFile:
        """The file of metrics; asked for once the run has its config.json, which names it."""
        return self._folder.open_metrics()

    @contextlib.contextmanager
    def following(self, step: int) -> Iterator[None]:
        """Show inside, where `step` steps are made already, how the next ones go."""
        self._progress = Progress(step, self._steps, enabled=self._show)
        self._boards = Boards(self._open_boards(step), self.say)
        try:
            yield
        finally:
            self._progress.close()
            self._boards.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line of metrics, which has at least `kind` and `step`."""
        self.metrics.append(line)
        self._boards.add(line)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Tell that `step` steps are made."""
        self._progress.update(step, loss, tokens_per_second)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._progress.say(text)

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        self.metrics.sync()


class SilentReporter(Reporter):
    """Tells nothing: of several processes, one alone does."""

    def __init__(self, folder: LoopFolder) -> None:
        super().__init__(folder, steps=0, show=False)

    def write(self, line: Mapping[str, Any]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


class Progress:
    """Shows steps, loss, tokens per second and time left.

    Args:
        first: steps already made when this process began.
        steps: steps of the whole run.
        stream: where to write.
        enabled: False shows nothing.
    """

    def __init__(self, first: int, steps: int, *, stream: TextIO | None = None, enabled: bool = True) -> None:
        self._steps = steps
        self._started = time.monotonic()
        self._told = False
        self._line = progress.Progress(total=steps, done=first, enabled=enabled, stream=stream, quiet_seconds=0.0)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Tell that `step` steps are made."""
        note = f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        self._line.update(step, note, always=step == self._steps)
        self._note_a_long_run()

    def _note_a_long_run(self) -> None:
        """Say once, when the speed is known, that a run takes long, and what can be done about it."""
        if self._told or time.monotonic() - self._started < _SECONDS_TO_KNOW_THE_SPEED:
            return
        self._told = True
        left = self._line.seconds_left()
        if left > _LONG:
            self.say(
                f"note: about {progress.format_seconds(left)} to go at this speed. Stop it whenever you like: --resume "
                "goes on. --max-minutes 30 stops by itself. Fewer --steps, or a smaller --preset or --batch-size, end "
                "sooner."
            )

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._line.say(text)

    def close(self) -> None:
        """Leave the last line where it is."""
        self._line.close(keep=True)


def plot_loss(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw training and validation loss of the metrics `lines` into `path`.

    Returns:
        Whether a plot was made: False when Matplotlib is not installed or there is nothing to draw.
    """
    training = _points(lines, "train")
    if not plotting.is_installed() or not training:
        return False
    with plotting.picture(path, (7, 4.5)) as axes:
        axes.plot(*zip(*training, strict=True), color="C0", alpha=0.3, linewidth=0.8, label="training")
        axes.plot(*zip(*_running_mean(training), strict=True), color="C0", label=f"training, mean of {_SMOOTHED} lines")
        if validation := _points(lines, "evaluation"):
            axes.plot(*zip(*validation, strict=True), "o-", color="C1", markersize=3, label="validation")
        plotting.finish(axes, xlabel="step", ylabel="loss (nats per token)")
    return True


def _points(lines: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines if line.get("kind") == kind and line.get("loss") is not None]


def _running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    def mean(index: int) -> float:
        window = [loss for _, loss in points[max(0, index - _SMOOTHED + 1) : index + 1]]
        return sum(window) / len(window)

    return [(step, mean(index)) for index, (step, _) in enumerate(points)]
