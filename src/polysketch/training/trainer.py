"""`train`: a whole run, from its options to its result."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polysketch.data import TrainingWindows, require_same_tokenizer
from polysketch.models import TransformerLM
from polysketch.storage import FolderLock
from polysketch.training.begin import find_start, lay_out
from polysketch.training.board import Board
from polysketch.training.checkpoint import load_checkpoint
from polysketch.training.config import TrainingConfig
from polysketch.training.diagnostics import local_chunk
from polysketch.training.environment import reproducible
from polysketch.training.load import load_model
from polysketch.training.loop import TrainingLoop
from polysketch.training.metrics import MetricsFile
from polysketch.training.plan import Plan, make_plan
from polysketch.training.plot import plot_loss
from polysketch.training.progress import Progress
from polysketch.training.random_state import seed_everything
from polysketch.training.run_folder import RunFolder
from polysketch.training.signals import StopRequests
from polysketch.training.update import Updater
from polysketch.training.weights import load_weights, model_tensors


@dataclass(frozen=True)
class TrainingResult:
    """How a call of `train` ended.

    Attributes:
        folder: the run folder.
        step: number of optimizer steps made, all processes together.
        stopped_by: `finished`, `time` (`max_minutes`) or `signal`.
        signal_number: the signal, or None.
    """

    folder: Path
    step: int
    stopped_by: str
    signal_number: int | None = None


def train(config: TrainingConfig, *, progress: bool = True) -> TrainingResult:
    """Train a model as `config` says, or go on with a run that was stopped or killed.

    A run that is killed at any moment and resumed ends, on the same machine and library versions, with bit for bit
    the weights and metrics (but for times) of a run that was left alone. SIGINT and SIGTERM save and stop. Uses one
    process and one device.

    Args:
        config: the options; `config.data` is a folder made by `polysketch prepare`.
        progress: show progress on stderr.

    Returns:
        How it ended.

    Raises:
        ValueError, FileNotFoundError: something in the options, the data or the run folder does not fit.
        RuntimeError: another process uses the run folder, or loss or gradient is not finite (the message says at which
            step, and what to try).
        OSError: a file could not be written, for instance on a full disk; the last complete checkpoint is intact.
    """
    run = RunFolder(config.out)
    with _threads(config.threads):
        plan = make_plan(config)
        with reproducible(plan.device), FolderLock(run.lock), StopRequests() as stop:
            return _train_locked(run, plan, stop, progress)


def _train_locked(run: RunFolder, plan: Plan, stop: StopRequests, show: bool) -> TrainingResult:
    notes = Progress(0, plan.config.steps, enabled=show, bar=False)
    start = find_start(run, plan, notes.say)
    seed_everything(plan.config.seed)
    model = build_model(plan)
    updater = Updater(model, plan.config, plan.dtype)
    loop = TrainingLoop(run, plan, model, updater)
    if start is None:
        initialize(model, plan, updater)
    else:
        loop.load(load_checkpoint(start), start)
    lay_out(run, plan, start, notes.say)
    loop.save()
    notes.say(f"{run.path}: {model.num_parameters():,} parameters on {plan.device}, {_beginning(start, loop.step)}")
    _note_unused_prefix(model, plan, notes)
    reason = _run(run, plan, loop, stop, show)
    plot_loss(MetricsFile(run.metrics).read(), run.plot)
    return TrainingResult(run.path, loop.step, reason, stop.signal_number)


def _run(run: RunFolder, plan: Plan, loop: TrainingLoop, stop: StopRequests, show: bool) -> str:
    progress = Progress(loop.step, plan.config.steps, enabled=show)
    board = Board(run.tensorboard, first_step=loop.step, enabled=plan.config.tensorboard)
    try:
        return loop.run_until_stopped(progress, board, stop)
    finally:
        progress.close()
        board.close()


def build_model(plan: Plan) -> Any:
    """The model with its initial weights, drawn on the CPU so that they are the same on every device."""
    model = TransformerLM(plan.model)
    model.activation_checkpointing = plan.config.activation_checkpointing
    return model.to(plan.device).train()


def initialize(model: Any, plan: Plan, updater: Updater) -> None:
    """What happens once, before the first step: weights of another run, or the calibration of the prefix gains."""
    if plan.config.init_from is not None:
        _take_weights(model, plan, plan.config.init_from)
        return
    windows = TrainingWindows(plan.data.split("train").tokens, plan.config.context, plan.config.seed)
    batch = windows.batch(0, plan.config.batch_size)[: plan.config.batch_size // plan.config.accumulation, :-1]
    with updater.precision():
        model.calibrate(batch.to(plan.device))


def _take_weights(model: Any, plan: Plan, source: Path) -> None:
    other, description = load_model(source)
    require_same_tokenizer(
        description.tokenizer,
        plan.data.tokenizer,
        owner=f"the run {source}",
        other=f"the data folder {plan.config.data}",
    )
    load_weights(model, model_tensors(other), str(description.checkpoint))


def _note_unused_prefix(model: Any, plan: Plan, notes: Progress) -> None:
    chunk = local_chunk(model)
    if chunk is not None and chunk >= plan.config.context:
        notes.say(
            f"note: a context of {plan.config.context} lies within one local chunk of {chunk}, where attention is "
            "exact: the sketch is never used; a smaller local_chunk in --attention-options changes that"
        )


def _beginning(start: Path | None, step: int) -> str:
    return "a new run" if start is None else f"going on after step {step}"


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Use `number` CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
