"""The training loop: steps, metrics, evaluations and checkpoints, in an order that a kill cannot confuse."""

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from polysketch.data import TrainingWindows
from polysketch.training.board import Board
from polysketch.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    delete_leftovers,
    list_checkpoints,
    save_checkpoint,
)
from polysketch.training.diagnostics import measure
from polysketch.training.metrics import MetricsFile
from polysketch.training.optimizer import load_optimizer_tensors, optimizer_tensors
from polysketch.training.plan import Plan
from polysketch.training.progress import Progress
from polysketch.training.random_state import load_random_tensors, random_tensors
from polysketch.training.run_folder import RunFolder
from polysketch.training.signals import StopRequests
from polysketch.training.update import Gradient, Updater
from polysketch.training.weights import load_weights, model_tensors


class TrainingLoop:
    """A run in progress.

    Everything that decides how it goes on is in `checkpoint()`: model, optimizer, random states and the step, of which
    data and learning rate are functions. A step's metrics are written before its checkpoint, so the lines up to a
    checkpoint's step are complete when it is.

    Args:
        run: the run folder, locked and laid out.
        plan: the resolved options.
        model: a TransformerLM on its device.
        updater: its optimizer steps.

    Attributes:
        step: number of optimizer steps made.
        seconds: time spent in steps, over all processes of the run.
    """

    def __init__(self, run: RunFolder, plan: Plan, model: Any, updater: Updater) -> None:
        self.step = 0
        self.seconds = 0.0
        self._run = run
        self._plan = plan
        self._config = plan.config
        self._model = model
        self._updater = updater
        self._metrics = MetricsFile(run.metrics)
        self._windows = TrainingWindows(plan.data.split("train").tokens, self._config.context, self._config.seed)
        self._saved_step: int | None = None
        self._logged = (0, 0.0)  # step and seconds of the last line of metrics of this process

    def checkpoint(self) -> Checkpoint:
        """The state of the run."""
        return Checkpoint(
            model=model_tensors(self._model),
            optimizer=optimizer_tensors(self._model, self._updater.optimizer),
            random=random_tensors(),
            state={"step": self.step, "seconds": self.seconds},
        )

    def load(self, checkpoint: Checkpoint, source: Path) -> None:
        """Go back to a state of the run.

        Raises:
            ValueError: the checkpoint is of another configuration.
        """
        load_weights(self._model, checkpoint.model, str(source))
        load_optimizer_tensors(self._model, self._updater.optimizer, checkpoint.optimizer)
        load_random_tensors(checkpoint.random)
        self.step, self.seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        self._saved_step = self.step
        self._logged = (self.step, self.seconds)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one.

        Raises:
            OSError: it could not be written; says up to where the run is safe.
        """
        if self._saved_step == self.step:
            return
        try:
            self._metrics.sync()
            save_checkpoint(self._run.checkpoints, self.checkpoint(), keep=self._config.keep)
        except OSError as error:
            with contextlib.suppress(OSError):
                delete_leftovers(self._run.checkpoints)  # on a full disk they are in the way
            raise OSError(self._unwritten(error)) from error
        self._saved_step = self.step

    def _unwritten(self, error: OSError) -> str:
        there = list_checkpoints(self._run.checkpoints)
        safe = f"the run is safe up to {there[-1].name}" if there else "the run has no checkpoint yet"
        return (
            f"the checkpoint of step {self.step} could not be written: {error.strerror or error} "
            f"({error.filename}); {safe}: free disk space, then give the same command with --resume"
        )

    def run_until_stopped(self, progress: Progress, board: Board, stop: StopRequests) -> str:
        """Make steps until the run is finished or something asks it to stop, and save.

        Returns:
            Why it stopped: `finished`, `signal` or `time`.

        Raises:
            RuntimeError: loss or gradient is not finite.
            OSError: a file could not be written.
        """
        deadline = time.monotonic() + 60 * (self._config.max_minutes or math.inf)
        while self.step < self._config.steps and stop.signal_number is None and time.monotonic() < deadline:
            self._make_step(progress, board)
        self.save()
        if self.step == self._config.steps:
            return "finished"
        return "time" if stop.signal_number is None else "signal"

    def _make_step(self, progress: Progress, board: Board) -> None:
        started = time.perf_counter()
        self._model.redraw(self.step)
        gradient = self._updater.compute_gradient(self._windows.batch(self.step, self._config.batch_size))
        self._refuse_non_finite(gradient)
        rate = self._updater.apply(self.step)
        self.step += 1
        self.seconds += time.perf_counter() - started
        if self._is_due(self._config.log_every):
            self._log(gradient, rate, progress, board)
        if self._config.eval_every and self._is_due(self._config.eval_every):
            self._evaluate(progress, board)
        if self._is_due(self._config.save_every):
            self.save()

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self._config.steps

    def _log(self, gradient: Gradient, rate: float, progress: Progress, board: Board) -> None:
        tokens_per_step = self._config.batch_size * self._config.context
        last_step, last_seconds = self._logged
        speed = (self.step - last_step) * tokens_per_step / max(self.seconds - last_seconds, 1e-9)
        self._logged = (self.step, self.seconds)
        line = {
            "kind": "train",
            "step": self.step,
            "loss": gradient.loss,
            "learning_rate": rate,
            "gradient_norm": gradient.norm,
            "tokens": self.step * tokens_per_step,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }
        self._metrics.append(line)
        board.add(line)
        progress.update(self.step, gradient.loss, speed)

    def _evaluate(self, progress: Progress, board: Board) -> None:
        with self._updater.precision():
            figures = measure(
                self._model,
                self._plan.data,
                context=self._config.context,
                batch_size=self._config.batch_size // self._config.accumulation,
                max_tokens=self._config.eval_tokens,
            )
        line = {"kind": "evaluation", "step": self.step} | figures
        self._metrics.append(line)
        board.add(line)
        bits = "" if figures["bits_per_byte"] is None else f", {figures['bits_per_byte']:.4f} bits per byte"
        progress.say(f"step {self.step}: validation loss {figures['loss']:.4f}{bits}")

    def _refuse_non_finite(self, gradient: Gradient) -> None:
        if math.isfinite(gradient.loss) and math.isfinite(gradient.norm):
            return
        saved = checkpoint_name(self._saved_step or 0)
        raise RuntimeError(
            f"step {self.step + 1}: expected a finite loss and gradient, found loss {gradient.loss} and gradient norm "
            f"{gradient.norm}; the run is safe up to {saved}. Often the learning rate is too high: start a new run "
            f"with a lower --learning-rate (now {self._config.learning_rate}), a longer --warmup (now "
            f"{self._config.warmup_steps}), a smaller --clip (now {self._config.clip}) or --dtype float32"
        )
