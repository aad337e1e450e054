"""`train`: a whole run, from its options to its result."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polysketch.distributed.processes import Processes, joined
from polysketch.storage import FolderLock
from polysketch.training.best import better
from polysketch.training.boards import Board, TensorBoard, Tracker, tensorboard_is_installed
from polysketch.training.config import TrainingConfig
from polysketch.training.environment import reproducible, use_threads
from polysketch.training.loop import Loop, StopRequests, Task, deadline
from polysketch.training.memory import check_memory
from polysketch.training.reporting import Reporter, SilentReporter, plot_loss
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import Plan, facts_to_agree_on, find_start, lay_out, make_plan
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
        best_step: step of the evaluation with the least loss, whose checkpoint is kept; None where there is none.
    """

    folder: Path
    step: int
    stopped_by: str
    signal_number: int | None = None
    best_step: int | None = None


def train(config: TrainingConfig, *, progress: bool = True) -> TrainingResult:
    """Train a model as `config` says, or go on with a run that was stopped or killed.

    A run that is killed at any moment and resumed ends, on the same machine and library versions, with bit for bit
    the weights and metrics (but for times) of a run that was left alone. SIGINT and SIGTERM save and stop.

    Uses one process and one device, or, where torchrun started several processes, all of them, each with a device (see
    `config.mesh`): each calls this with the same options. Where one of them fails or dies, all end, from a side thread
    where need be, and the first one tells why.

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
        ToldByAnother: several processes, of which another one raises one of these.
    """
    run = RunFolder(config.out)
    with use_threads(config.threads), joined(config.mesh, config.device) as processes:
        plan = processes.together(lambda: make_plan(config, processes))
        processes.agree({} if processes.alone else facts_to_agree_on(plan))
        requests = StopRequests(echoed=not processes.alone, answers=processes.is_first)
        with reproducible(plan.device), _locked(run, processes), requests as stop:
            return _train_locked(run, plan, stop, progress, processes)


def _plot(reporter: Reporter, path: Path) -> None:
    """Draw the loss; a run that is finished and saved does not fail for a picture."""
    try:
        plot_loss(reporter.metrics.read(), path)
    except OSError as error:
        reporter.say(f"note: no plot of the loss in {path}: {error.strerror or error}")


@contextlib.contextmanager
def _locked(run: RunFolder, processes: Processes) -> Iterator[None]:
    """Hold the run folder for all processes."""
    lock = FolderLock(run.lock)
    with contextlib.ExitStack() as held:
        processes.first(lambda: (held.enter_context(lock), None)[1])
        yield


def _train_locked(run: RunFolder, plan: Plan, stop: StopRequests, show: bool, processes: Processes) -> TrainingResult:
    config = plan.config
    reporter = _reporter(run, config, show, processes)
    start = _start(run, plan, reporter.say, processes)
    processes.first(plan.goal.verify)
    rows = plan.goal.rows()
    seed_everything(config.seed)
    task = TrainingTask(plan, processes, begins=start is None)
    loop = Loop(run, config, task, rows, reporter, processes)
    if start is not None:
        processes.together(lambda: loop.load(start))
    processes.first(lambda: lay_out(run, plan, start, reporter.say))
    processes.agree({"the run's config.json": run.config_digest()})  # all see one folder
    loop.save()
    beginning = "a new run" if start is None else f"going on after step {loop.step}"
    reporter.say(f"{run.path}: {task.model.num_parameters():,} parameters on {plan.device}, {beginning}")
    for note in plan.goal.notes(task.model, rows):
        reporter.say(note)
    reason = loop.run(stop, deadline(config))
    if processes.is_first:
        _plot(reporter, run.plot)
    best = None if task.best is None else task.best.step
    return TrainingResult(run.path, loop.step, reason, stop.signal_number, best)


def _reporter(run: RunFolder, config: TrainingConfig, show: bool, processes: Processes) -> Reporter:
    """What tells of the run: one of the processes alone."""
    if not processes.is_first:
        return SilentReporter(run)
    return Reporter(run, config.steps, show=show, boards=lambda step: _boards(run, config, step))


def _boards(run: RunFolder, config: TrainingConfig, step: int) -> Iterator[Board]:
    """The boards that the options ask for, of a run that made `step` steps already."""
    if config.tensorboard and tensorboard_is_installed():
        yield TensorBoard(run.tensorboard, first_step=step)
    if config.tracker != "none":
        saved = run.read_config()
        yield Tracker(
            config.tracker,
            project=config.tracker_project,
            run=run.path.resolve().name,
            identity=run.identity() or str(saved["data"]["description_sha256"]),
            config={"training": saved["training"], "model": saved["model"]},
        )


def _start(run: RunFolder, plan: Plan, say: Callable[[str], None], processes: Processes) -> Path | None:
    """The checkpoint that all processes start from."""

    def name() -> str | None:
        start = find_start(run, plan, say)
        return None if start is None else start.name

    found = processes.first(name)
    return None if found is None else run.checkpoints / found


class TrainingTask(Task):
    """Training towards a goal: one stage, evaluated every so many steps.

    Args:
        plan: the resolved options.
        processes: those that the model is shared out over.
        begins: whether the run begins here; its model is initialised then, else waits for `load`.

    Attributes:
        model: with its initial weights.
    """

    stage = "train"
    first_step = 0

    def __init__(self, plan: Plan, processes: Processes, *, begins: bool) -> None:
        config = plan.config
        self._plan, self._processes = plan, processes
        self.model = build_model(plan)
        processes.together(lambda: check_memory(self.model, config, plan.device, plan.dtype, processes.count))
        processes.together(lambda: plan.goal.check_layers(self.model, processes))
        if begins:
            processes.together(lambda: plan.goal.initialize(self.model, plan.device, plan.dtype))
        _share_out(self.model, processes)
        self.updater = Updater(self.model, config.step_options(), plan.dtype, processes)
        self.ends = (config.steps,)
        self.measured = plan.goal.measured_by() if config.keep_best else None
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
        with self.updater.precision():
            figures = self._plan.goal.measure(self.model, self._processes)
        reporter.write({"kind": "evaluation", "step": step} | figures)
        if self.measured is not None:
            loss = self._processes.first(lambda: figures["loss"])  # others may differ by rounding
            self.best = better(self.best, step, loss, self.measured)
        reporter.say(f"step {step}: {self._plan.goal.told(figures)}")

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's weights and saved buffers."""
        return self.model.state_dict()

    def load(self, step: int, tensors: Mapping[str, Tensor], source: str) -> None:
        """Put them back."""
        load_weights(self.model, tensors, source)


def build_model(plan: Plan) -> Any:
    """The model with its initial weights, drawn on the CPU so that they are the same on every device."""
    return plan.goal.build_model().to(plan.device).train()


def _share_out(model: Any, processes: Processes) -> None:
    """Share a model out over the processes, with the first one's weights, whatever the rounding of the others."""
    mesh = processes.device_mesh
    if mesh is None:
        return
    from polysketch.distributed.sharding import shard

    processes.take_first(model.state_dict())
    blocks = () if processes.context else model.all_blocks
    continued = ["forward_continued"] if all(hasattr(block, "forward_continued") for block in blocks) else []
    shard(model, mesh, blocks=blocks, method="loss", block_methods=continued)
