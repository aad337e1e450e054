"""`train`: a whole run, from its options to its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polysketch.data import DocumentRows, TrainingWindows, require_same_tokenizer
from polysketch.models import TransformerLM
from polysketch.storage import FolderLock
from polysketch.training.config import TrainingConfig
from polysketch.training.diagnostics import local_chunk, measure
from polysketch.training.environment import reproducible, use_threads
from polysketch.training.loading import load_model
from polysketch.training.loop import Loop, StopRequests, Task, deadline
from polysketch.training.reporting import Reporter, plot_loss
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import Plan, find_start, lay_out, make_plan
from polysketch.training.step import Updater
from polysketch.training.tensors import load_weights, seed_everything


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
    with use_threads(config.threads):
        plan = make_plan(config)
        with reproducible(plan.device), FolderLock(run.lock), StopRequests() as stop:
            return _train_locked(run, plan, stop, progress)


def _train_locked(run: RunFolder, plan: Plan, stop: StopRequests, show: bool) -> TrainingResult:
    config = plan.config
    reporter = Reporter(run.metrics, config.steps, show=show, board=run.tensorboard if config.tensorboard else None)
    start = find_start(run, plan, reporter.say)
    seed_everything(config.seed)
    task = TrainingTask(plan)
    rows = training_rows(plan)
    loop = Loop(run, config, task, rows, reporter)
    if start is None:
        initialize(task.model, plan, task.updater)
    else:
        loop.load(start)
    lay_out(run, plan, start, reporter.say)
    loop.save()
    beginning = "a new run" if start is None else f"going on after step {loop.step}"
    reporter.say(f"{run.path}: {task.model.num_parameters():,} parameters on {plan.device}, {beginning}")
    if isinstance(rows, DocumentRows):
        reporter.say(f"documents packed into {rows.num_rows:,} rows an epoch, {rows.padding_share:.2%} padding")
    _note_unused_prefix(task.model, plan, reporter.say)
    reason = loop.run(stop, deadline(config))
    plot_loss(reporter.metrics.read(), run.plot)
    return TrainingResult(run.path, loop.step, reason, stop.signal_number)


class TrainingTask(Task):
    """Training of a TransformerLM: one stage, evaluated every so many steps.

    Args:
        plan: the resolved options.

    Attributes:
        model: with its initial weights.
    """

    stage = "train"
    first_step = 0

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self._plan = plan
        self.model = build_model(plan)
        self.updater = Updater(self.model, config.step_options(), plan.dtype)
        self.ends = (config.steps,)
        self.advice = (
            f"start a new run with a lower --learning-rate (now {config.learning_rate}), a longer --warmup (now "
            f"{config.warmup_steps}), a smaller --clip (now {config.clip}) or --dtype float32"
        )

    def begin_step(self, step: int) -> None:
        """Draw random features anew where the mechanism does."""
        self.model.redraw(step)

    def end_step(self, step: int, reporter: Reporter) -> None:
        """Evaluate where that is due."""
        every = self._plan.config.eval_every
        if every and (step % every == 0 or step in self.ends):
            self._evaluate(step, reporter)

    def _evaluate(self, step: int, reporter: Reporter) -> None:
        config = self._plan.config
        with self.updater.precision():
            figures = measure(
                self.model,
                self._plan.data,
                context=config.context,
                batch_size=config.batch_size // config.accumulation,
                max_tokens=config.eval_tokens,
            )
        reporter.write({"kind": "evaluation", "step": step} | figures)
        bits = "" if figures["bits_per_byte"] is None else f", {figures['bits_per_byte']:.4f} bits per byte"
        reporter.say(f"step {step}: validation loss {figures['loss']:.4f}{bits}")

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's weights and saved buffers."""
        return self.model.state_dict()

    def load(self, step: int, tensors: Mapping[str, Tensor], source: str) -> None:
        """Put them back."""
        load_weights(self.model, tensors, source)


def build_model(plan: Plan) -> Any:
    """The model with its initial weights, drawn on the CPU so that they are the same on every device."""
    model = TransformerLM(plan.model)
    model.activation_checkpointing = plan.config.activation_checkpointing
    return model.to(plan.device).train()


def training_rows(plan: Plan) -> TrainingWindows | DocumentRows:
    """What the run trains on, in its order: windows, or rows of documents."""
    if plan.config.pack == "windows":
        return _windows(plan)
    tokens = plan.data.split("train").tokens
    return DocumentRows(tokens, plan.config.context, plan.config.seed, plan.data.description.end_of_text)


def _windows(plan: Plan) -> TrainingWindows:
    return TrainingWindows(plan.data.split("train").tokens, plan.config.context, plan.config.seed)


def initialize(model: Any, plan: Plan, updater: Updater) -> None:
    """What happens once, before the first step: weights of another run, or the calibration of the prefix gains.

    Gains are calibrated on windows, whatever is trained on: these reach as far as the context.
    """
    if plan.config.init_from is not None:
        _take_weights(model, plan, plan.config.init_from)
        return
    batch = _windows(plan).batch(0, plan.config.batch_size)[: plan.config.batch_size // plan.config.accumulation, :-1]
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
    load_weights(model, other.state_dict(), str(description.checkpoint))


def _note_unused_prefix(model: Any, plan: Plan, say: Callable[[str], None]) -> None:
    chunk = local_chunk(model)
    if chunk is not None and chunk >= plan.config.context:
        say(
            f"note: a context of {plan.config.context} lies within one local chunk of {chunk}, where attention is "
            "exact: the sketch is never used; a smaller local_chunk in --attention-options changes that"
        )
