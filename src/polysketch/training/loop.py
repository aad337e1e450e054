"""The loop of every run: steps, metrics, evaluations and checkpoints, in an order that a kill cannot confuse."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor

from polysketch.data import DocumentLanes, DocumentRows, TrainingWindows
from polysketch.distributed.processes import Processes
from polysketch.distributed.shares import local
from polysketch.storage.folders import DISK_FULL
from polysketch.tasks import TaskRows
from polysketch.training.best import BestEvaluation, best_of
from polysketch.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    delete_leftovers,
    list_checkpoints,
    load_carried,
    load_checkpoint,
    load_shared_checkpoint,
    require_bound,
)
from polysketch.training.options import RunOptions
from polysketch.training.reporting import Reporter
from polysketch.training.run_folder import LoopFolder
from polysketch.training.saving import Saver
from polysketch.training.step import Gradient, Updater
from polysketch.training.tensors import (
    load_optimizer_tensors,
    load_random_tensors,
    optimizer_tensors,
    optimizer_tensors_to_load,
    random_tensors,
    tensors_to_load,
)


class Task:
    """What a loop works on, in one stage or several, one after the other; subclasses say what the steps are.

    Attributes:
        stage: name of the current stage, the `kind` of its lines of metrics.
        first_step: number of the step with which the stage began.
        ends: numbers of steps after which a stage is over; after the last of them, all is.
        updater: the optimizer steps of the stage.
        advice: what to change where loss or gradient was not finite.
        best: the evaluation with the least loss, whose checkpoint is kept; None before the first, and where none is
            to be kept.
        measured: how losses of evaluations are measured, JSON values, for those of other kinds cannot be compared;
            None where no best one is to be kept.
    """

    stage: str
    first_step: int
    ends: tuple[int, ...]
    updater: Updater
    advice: str
    best: BestEvaluation | None = None
    measured: Mapping[str, Any] | None = None

    def begin_step(self, step: int) -> None:
        """What comes before step number `step` (from 0)."""

    def end_step(self, step: int, reporter: Reporter) -> None:
        """What comes after step number `step` (from 1): measure what is due, and begin the next stage."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint must hold of the model."""
        raise NotImplementedError

    def load(self, step: int, tensors: Mapping[str, Tensor], source: str) -> None:
        """Go back to the stage and the tensors that a checkpoint after `step` steps holds.

        Raises:
            ValueError: they belong to another configuration.
        """
        raise NotImplementedError


class Loop:
    """A run in progress.

    Everything that decides how it goes on is in `checkpoint()`: tensors, optimizer, random states, the states of
    documents that go on, and the step, of which data, learning rate and stage are functions. A step's metrics are
    written before its checkpoint, so the lines up to a checkpoint's step are complete when it is. A
    checkpoint is copied at its step, and written while the next steps are made.

    Args:
        folder: locked by this process, with a folder of checkpoints.
        options: of the run.
        task: what to do in the steps.
        rows: what to train on.
        reporter: told of everything.
        processes: those that the run is computed by, all of which have a loop; one alone by default.

    Attributes:
        step: number of optimizer steps made.
        tokens: predicted in them; padding is none.
        seconds: time spent in steps, over all processes of the run.
    """

    def __init__(
        self,
        folder: LoopFolder,
        options: RunOptions,
        task: Task,
        rows: TrainingWindows | DocumentRows | DocumentLanes | TaskRows,
        reporter: Reporter,
        processes: Processes | None = None,
    ) -> None:
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self._folder, self._options, self._task = folder, options, task
        self._rows, self._reporter = rows, reporter
        self._processes = processes or Processes()
        self._saver = Saver(folder.checkpoints, options.keep, self._processes)
        self._identity: str | None = None  # known once config.json is written
        self._logged = (0, 0.0)  # tokens and seconds of the last line of metrics of this process

    def run(self, stop: "StopRequests", deadline: float) -> str:
        """Make steps until the run is finished or something asks it to stop, and save.

        Args:
            stop: asks to stop after a signal; of several processes, a signal to one stops all after the same step.
            deadline: the time, by `time.monotonic`, after which no step is begun; of several processes, the first's.

        Returns:
            Why it stopped: `finished`, `signal` or `time`.

        Raises:
            RuntimeError: loss or gradient is not finite.
            OSError: a file could not be written.
        """
        steps = self._task.ends[-1]
        with self._reporter.following(self.step), self._saver:
            while self.step < steps and not self._is_to_stop(stop, deadline):
                gradient, rate = self._make_step()
                self._reporter.update(self.step, gradient.loss, self._speed())
                if self._is_due(self._options.log_every):
                    self._log(gradient, rate)
                self._task.end_step(self.step, self._reporter)
                if self._is_due(self._options.save_every) or self._is_best():
                    self._begin_to_save()
            self.save()
        if self.step == steps:
            return "finished"
        return "time" if stop.signal_number is None else "signal"

    def _is_to_stop(self, stop: "StopRequests", deadline: float) -> bool:
        signal_number, time_is_up, failed = self._processes.agreed_stop(
            stop.signal_number, time.monotonic() >= deadline, self._saver.failed
        )
        if failed:
            self._finish_saving()
        if signal_number is not None:  # a signal that comes meanwhile must not be forgotten
            stop.signal_number = signal_number
        return time_is_up or signal_number is not None

    def _make_step(self) -> tuple[Gradient, float]:
        started = time.perf_counter()
        self._task.begin_step(self.step)
        gradient = self._task.updater.compute_gradient(self._rows.batch(self.step, self._options.batch_size))
        self._require_finite(gradient)
        rate = self._task.updater.apply(self.step - self._task.first_step)
        self.step += 1
        self.tokens += gradient.tokens
        self.seconds += time.perf_counter() - started
        return gradient, rate

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step in self._task.ends

    def _is_best(self) -> bool:
        return self._task.best is not None and self._task.best.step == self.step

    def _require_finite(self, gradient: Gradient) -> None:
        if math.isfinite(gradient.loss) and math.isfinite(gradient.norm):
            return
        self._finish_saving()
        safe = checkpoint_name(self._saver.saved_step or 0)
        raise RuntimeError(
            f"step {self.step + 1}: expected a finite loss and gradient, found loss {gradient.loss} and gradient norm "
            f"{gradient.norm}; the run is safe up to {safe}. Often the learning rate is too high: {self._task.advice}"
        )

    def _require_finite_weights(self) -> None:
        if all(bool(local(tensor).isfinite().all()) for tensor in self._task.tensors().values()):
            return
        safe = checkpoint_name(self._saver.saved_step or 0)
        raise RuntimeError(
            f"step {self.step}: expected finite weights, found NaN or infinity; the run is safe up to {safe}. Often "
            f"the learning rate is too high: {self._task.advice}"
        )

    def _log(self, gradient: Gradient, rate: float) -> None:
        speed = self._speed()
        self._logged = (self.tokens, self.seconds)
        line = {
            "kind": self._task.stage,
            "step": self.step,
            "loss": gradient.loss,
            "learning_rate": rate,
            "gradient_norm": gradient.norm,
            "tokens": self.tokens,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }
        if isinstance(self._rows, DocumentRows | DocumentLanes):
            line["padding_share"] = 1 - self.tokens / self._places(self.step)
        self._reporter.write(line)

    def _speed(self) -> float:
        """Tokens a second since the last line of metrics."""
        last_tokens, last_seconds = self._logged
        return (self.tokens - last_tokens) / max(self.seconds - last_seconds, 1e-9)

    def _places(self, steps: int) -> int:
        """Places for tokens in the rows of so many steps."""
        return steps * self._options.batch_size * self._options.context

    def checkpoint(self) -> Checkpoint:
        """The state of the run."""
        updater = self._task.updater
        return Checkpoint(
            model=self._task.tensors(),
            optimizer=optimizer_tensors(updater.model, updater.optimizer),
            random=random_tensors(),
            state={"step": self.step, "tokens": self.tokens, "seconds": self.seconds, **self._best(), **self._run()},
            carried=updater.carried.tensors() if isinstance(self._rows, DocumentLanes) else None,
        )

    def _best(self) -> dict[str, Any]:
        return {} if self._task.best is None else self._task.best.entry()

    def _run(self) -> dict[str, str]:
        """What binds a checkpoint to its run."""
        if self._identity is None:
            self._identity = self._folder.identity()
        return {} if self._identity is None else {"run": self._identity}

    def load(self, path: Path) -> None:
        """Go back to the checkpoint in the folder `path`.

        Raises:
            FileNotFoundError, ValueError: it is incomplete, altered, of another configuration, or of another run.
        """
        checkpoint = self._read(path)
        require_bound(path, checkpoint.state, self._run().get("run"))
        step = checkpoint.state["step"]
        self._task.load(step, checkpoint.model, str(path))
        self._task.best = self._best_before(checkpoint.state)
        updater = self._task.updater
        load_optimizer_tensors(updater.model, updater.optimizer, checkpoint.optimizer)
        load_random_tensors(checkpoint.random)
        if isinstance(self._rows, DocumentLanes):
            updater.load_carried(load_carried(path), self._options.batch_size)
        self.step, self.seconds = step, checkpoint.state.get("seconds", 0.0)
        # A checkpoint that does not say is of a run on windows, where every place has a token.
        self.tokens = checkpoint.state.get("tokens", self._places(step))
        self._saver.saved_step = self.step
        self._logged = (self.tokens, self.seconds)

    def _best_before(self, state: Mapping[str, Any]) -> BestEvaluation | None:
        """The best evaluation up to the checkpoint with this state, if later ones can be compared with it."""
        best, measured = best_of(state, self._folder.checkpoints), self._task.measured
        if best is None or measured is None:
            return None
        if best.measured in (None, measured):
            return best
        self._reporter.say(
            f"note: the least loss so far, {best.loss:.4f} after step {best.step}, was measured otherwise "
            f"({_differences(best.measured, measured)}): the best checkpoint is looked for anew"
        )
        return None

    def _read(self, path: Path) -> Checkpoint:
        if self._processes.alone:
            return load_checkpoint(path)
        model = self._task.updater.model
        return load_shared_checkpoint(path, model=tensors_to_load(model), optimizer=optimizer_tensors_to_load(model))

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and wait until it is complete.

        Raises:
            OSError: it, or the one before, could not be written; says up to where the run is safe.
        """
        self._begin_to_save()
        self._finish_saving()

    def _begin_to_save(self) -> None:
        if self.step in (self._saver.saved_step, self._saver.step):
            return
        self._finish_saving()
        self._processes.together(self._require_finite_weights)  # before older checkpoints go
        self._saver.begin(self.checkpoint(), before=self._reporter.sync)

    def _finish_saving(self) -> None:
        try:
            self._saver.wait()
        except OSError as error:
            if self._processes.is_first:
                with contextlib.suppress(OSError):
                    delete_leftovers(self._folder.checkpoints)  # on a full disk they are in the way
            raise OSError(self._unwritten(error)) from error

    def _unwritten(self, error: OSError) -> str:
        there = list_checkpoints(self._folder.checkpoints)
        safe = f"the run is safe up to {there[-1].name}" if there else "the run has no checkpoint yet"
        mend = "free disk space" if error.errno in DISK_FULL else "mend that"
        return (
            f"the checkpoint of step {self._saver.step} could not be written: {error.strerror or error} "
            f"({error.filename}); {safe}: {mend}, then give the same command with --resume"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = sorted(before.keys() | now.keys())
    return ", ".join(f"{name} {before.get(name)}" for name in names if before.get(name) != now.get(name))


def deadline(options: RunOptions) -> float:
    """The time, by `time.monotonic`, at which a process that starts now has had its minutes."""
    return time.monotonic() + 60 * (options.max_minutes or math.inf)


_ANSWER = b"\nstopping after this step, and saving; Ctrl-C from now on ends at once, without saving\n"


class StopRequests:
    """Records the first SIGINT or SIGTERM while it is entered; a second one has its usual effect at once.

    The trainer looks at `signal_number` between two steps, so a stop costs at most one step and one checkpoint. Outside
    the main thread, where Python allows no handlers, nothing is installed and nothing is ever requested.

    The first signal is answered at once, by a line on stderr: a step may take minutes.

    Args:
        echoed: after the first signal further SIGTERMs do nothing: torchrun passes on what its processes may have got
            already from whoever ends the whole job.
        answers: whether this process tells of the first signal; of several, one does.

    Attributes:
        signal_number: the signal that came, or None.
    """

    def __init__(self, *, echoed: bool = False, answers: bool = True) -> None:
        self._echoed, self._answers = echoed, answers
        self.signal_number: int | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self._answers:
            with contextlib.suppress(OSError):  # past Python's buffers, which may be in use at this moment
                os.write(2, _ANSWER)
        if self._echoed:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not installed from Python cannot be put back by name: None means the default.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
