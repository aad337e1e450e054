"""Studies of tasks: every mechanism learns one task, and is measured on rows that it has not seen."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polysketch import attention
from polysketch.evaluation import measure_answers
from polysketch.ops.arguments import check_at_least_one
from polysketch.studies import verdicts
from polysketch.studies.finished import require_finished
from polysketch.studies.presentation import Line, number, plot_lines
from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Study, Verdict
from polysketch.tasks import GeneratedTask, Task, is_task, open_task, task_class, write_task
from polysketch.training import TrainingConfig, load_answering_model, train
from polysketch.training.run_folder import RunFolder

_NEARBY = ("local_chunk", "window", "chunk_size", "sample_size", "min_length")
"""Options that count nearby or sampled tokens: their defaults are as long as the whole row or longer."""

_OF_MODEL = ("rotary", "attention_every")
_AMONG_WINDOWS = "attention_every=2"  # as presets have it

_NEWER = ("state_at", "validation_rows", "training", "shorter")  # than some records, which say nothing of them

FEW: dict[str, Any] = {"steps": 2, "batch_size": 4, "layers": 1, "evaluations": 1, "validation_rows": 4, "test_rows": 8}
"""Of every smoke size."""

_SPAN = 512  # tokens read at once to fill a state
_COLOURS = 10  # of Matplotlib's cycle; lines beyond them are dashed


@dataclass(frozen=True)
class Shorter:
    """Training on shorter rows of a task, before those that count.

    Attributes:
        length: of the rows.
        steps, batch_size, learning_rate: of training.
    """

    length: int
    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True)
class TaskSettings:
    """One size of a study.

    Attributes:
        task: sizes of the task; of one from files, see `TaskStudy.task_of`.
        preset, layers: of the model.
        steps, batch_size, learning_rate: of training.
        training: more options of `TrainingConfig`, for instance its `warmup`.
        shorter: rows to learn from before, one length after the other, each longer than the last; a learning rate rises
            and falls for each. Their steps come first in a record's curve, which has their accuracies too; the step of
            99 % is counted among the others.
        evaluations: during training.
        validation_rows: of each evaluation; None for as many as 65,536 tokens hold.
        test_rows: that the trained model is measured on.
        nearby: tokens of chunks, windows and samples, for mechanisms that have them; 0 for their defaults.
        lengths: other lengths that the trained model is measured at.
        state_at: tokens after which the state that decoding carries is measured; none for models that do not decode.
    """

    task: dict[str, Any] = field(default_factory=dict)
    preset: str = "tiny"
    layers: int = 2
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    shorter: tuple[Shorter, ...] = ()
    evaluations: int = 30
    validation_rows: int | None = None
    test_rows: int = 1_000
    nearby: int = 16
    lengths: tuple[int, ...] = ()
    state_at: tuple[int, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "evaluations", "test_rows")
        check_at_least_one(**{name: getattr(self, name) for name in counts})
        try:  # of JSON too
            shorter = tuple(one if isinstance(one, Shorter) else Shorter(**one) for one in self.shorter)
        except TypeError as error:
            fields = ", ".join(one.name for one in dataclasses.fields(Shorter))
            raise ValueError(f"shorter: expected a list of {{{fields}}}, found {self.shorter!r}") from error
        object.__setattr__(self, "shorter", shorter)
        lengths = [one.length for one in shorter]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"shorter: expected rows that grow from one to the next, found lengths {lengths}")


class TaskStudy(Study):
    """Mechanisms on one task, each with its default options.

    Args:
        name: of the task.
        claim, paper: as for `Study`.
        wanted: figure from which on the claim holds, of the row `judged`; 1 when it is not given.
        judged: the row that the claim is about; any of them when None, see `verdicts.of_any`.
        by: the figure: `accuracy` of answers, `whole_rows`, the share of rows without a mistake, or `loss`, which is to
            be at most `wanted`.
        as_softmax: the claim is that the row `judged` reaches `wanted` as softmax does, see `verdicts.as_softmax`.
        behind_softmax: the claim is that the row `judged`, or any in linear time, is no more than this accuracy behind
            softmax, see `verdicts.near_softmax`.
        learned: accuracy of softmax from which on such a claim is looked at: clearly above what a guess reaches.
        sizes: by name.
        mechanisms: rows; every mechanism that can by default.
        besides: rows with options, after the others. A row that is not among these may be made too.

    Attributes:
        own_options: of rows, that are not the mechanism's: `rotary` is the model's, for positions in the heads, as is
            `attention_every`, for windows between.
    """

    own_options: tuple[str, ...] = _OF_MODEL

    def __init__(
        self,
        name: str,
        *,
        claim: str,
        paper: str,
        wanted: float = 1.0,
        as_softmax: bool = False,
        behind_softmax: float | None = None,
        learned: float = 0.0,
        sizes: Mapping[str, TaskSettings],
        judged: str | None = None,
        by: verdicts.By = "accuracy",
        mechanisms: Sequence[str] | None = None,
        besides: Sequence[str] = (),
    ) -> None:
        self.name, self.claim, self.paper = name, claim, paper
        self.wanted, self.judged, self.by, self.sizes = wanted, judged, by, sizes
        self.as_softmax, self.behind_softmax, self.learned = as_softmax, behind_softmax, learned
        self.rows = (*(mechanisms or self._able()), *besides)
        self.needs = self.needed(())

    def needed(self, made: Collection[str]) -> Sequence[str]:
        """As the base class has it; the row judged may be one of the form that presets have, see `judged_of`."""
        compared = [verdicts.SOFTMAX] if self.as_softmax or self.behind_softmax is not None else []
        judged = self.judged_of(made)
        return (*compared, *([judged] if judged else []))

    def judged_of(self, made: Collection[str]) -> str | None:
        """The row that the claim is about: a mechanism in every layer, or where only that was made, in every second."""
        if self.judged is None:
            return None
        among_windows = f"{self.judged}+{_AMONG_WINDOWS}"
        return among_windows if self.judged not in made and among_windows in made else self.judged

    def _able(self) -> list[str]:
        both = self.asks in ("each", "class", "pair", "picture")
        return attention.mechanisms_that("is_bidirectional" if both else "is_causal")

    def check_row(self, row: str) -> None:
        """A mechanism that can, with any of its options, and `own_options`."""
        name, options = parsed(row)
        if name not in self._able():
            raise ValueError(f"expected rows of {', '.join(self.rows)}, found {row!r}")
        attention.check_options(name, {key: value for key, value in options.items() if key not in self.own_options})

    @property
    def asks(self) -> str:
        """What the task asks, by the class's default."""
        return str(task_class(self.name).asks)

    def task_of(self, settings: TaskSettings, seed: int) -> Task:
        """The task of a run."""
        return task_class(self.name)(**settings.task, seed=seed)

    def depends_on(self, row: str, seed: int, settings: TaskSettings) -> dict[str, Any]:
        """As the base class has it."""
        told = dataclasses.asdict(settings)
        for name in _NEWER:
            if not told[name]:
                del told[name]
        return {**told, "attention": row, "options": self.options_of(row, settings), "seed": seed}

    def options_of(self, row: str, settings: TaskSettings) -> dict[str, Any]:
        """What differs from the mechanism's defaults."""
        name, given = parsed(row)
        given = {key: value for key, value in given.items() if key not in self.own_options}
        return {**nearby_options(name, settings.nearby), **given}

    def trainings(self, row: str, seed: int, settings: TaskSettings, folder: Path, task: Task) -> list[TrainingConfig]:
        """The training runs of a row, one after the other; the last one's model is measured, and reads `task`."""
        name, given = parsed(row)
        of_model = {key: given.get(key) for key in _OF_MODEL}
        last = training_of(name, self.options_of(row, settings), seed, settings, folder, task, **of_model)
        runs: list[TrainingConfig] = []
        for one in settings.shorter:
            runs.append(_on_shorter(last, one, settings, at(task, one.length), after=runs))
        return [*runs, dataclasses.replace(last, init_from=runs[-1].out) if runs else last]

    def make(self, row: str, seed: int, settings: TaskSettings, folder: Path) -> dict[str, Any]:
        """Train, and measure."""
        task = open_task(_written(self.task_of(settings, seed), folder / "task"))
        _check_measurable(task, settings)
        steps, seconds, curve = 0, 0.0, []
        for config in self.trainings(row, seed, settings, folder, task):
            trained, evaluated = _run(config)
            seconds += trained[-1]["seconds"]
            if config.objective == "auto":  # hidden tokens are another question
                curve += [[steps + line["step"], line["loss"], line["accuracy"]] for line in evaluated]
                steps += config.steps
        model, _, _ = load_answering_model(config.out)
        return {
            "parameters": model.num_parameters(),
            "seconds": seconds,
            "curve": curve,
            "test": _measured(model, task, settings),
            "lengths": {str(length): _measured(model, at(task, length), settings) for length in settings.lengths},
            "state_bytes": {str(tokens): state_bytes(model, tokens) for tokens in settings.state_at},
        }

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each record."""
        lengths = sorted({int(length) for one in records for length in one["lengths"]})
        whole = ["whole rows %"] if self.by == "whole_rows" else []
        others = (f"{'whole rows ' if whole else ''}% at {length:,}" for length in lengths)
        heading = ["mechanism", "seed", "accuracy %", *whole, "loss", "99 % at step", *others]
        states = sorted({int(tokens) for one in records for tokens in one.get("state_bytes", ())})
        heading += ["parameters", "s", *(f"state KB at {tokens:,}" for tokens in states)]
        return heading, [_row(one, lengths, states, whole=bool(whole)) for one in records]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Accuracy over steps, and the loss where the claim is about it."""
        _draw(records, folder / "accuracy.png", lambda loss, accuracy: 100 * accuracy, ylabel=_ACCURACY, ylim=(-2, 102))
        if self.by == "loss":
            _draw(records, folder / "loss.png", lambda loss, accuracy: loss, ylabel=_LOSS, yscale="log", width=0.8)

    def told_size(self, settings: TaskSettings) -> str:
        """Sizes of the task that are not its defaults."""
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.task.items())

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By means over seeds."""
        figures = verdicts.Figures.of_records(records, self.by)
        judged = self.judged_of(figures.of)
        if self.behind_softmax is not None:
            return verdicts.near_softmax(figures, judged, self.rows, self.behind_softmax, self.learned)
        if judged is None:
            return verdicts.of_any(figures, self.rows, self.wanted)
        return (verdicts.as_softmax if self.as_softmax else verdicts.of_row)(figures, judged, self.wanted)


_ACCURACY, _LOSS = "accuracy on unseen rows (%)", "loss on unseen rows (nats an answer)"


def _draw(records: Sequence[Record], path: Path, shown: Callable[[float, float], float], **options: Any) -> None:
    """What a loss and an accuracy are shown as, over steps, a line for each seed."""
    rows = list(dict.fromkeys(one["row"] for one in records))
    lines = [
        Line(
            one["row"],
            [step for step, _, _ in one["curve"]],
            [shown(loss, accuracy) for _, loss, accuracy in one["curve"]],
            dashed=rows.index(one["row"]) >= _COLOURS,
        )
        for one in records
    ]
    plot_lines(path, lines, xlabel="step", **options)


def _written(task: Task, folder: Path) -> Path:
    """The folder, with the task in it."""
    if not is_task(folder):
        write_task(task, folder)
    return folder


def _on_shorter(
    last: TrainingConfig, shorter: Shorter, settings: TaskSettings, task: Task, *, after: Sequence[TrainingConfig]
) -> TrainingConfig:
    """A run on shorter rows, as the last one but for its size."""
    every = max(1, shorter.steps // settings.evaluations)
    return dataclasses.replace(
        last,
        data=_written(task, last.out.with_name(f"task-{shorter.length}")),
        out=last.out.with_name(f"run-{shorter.length}"),
        steps=shorter.steps,
        batch_size=shorter.batch_size,
        learning_rate=shorter.learning_rate,
        eval_every=every,
        save_every=every,
        eval_tokens=_eval_tokens(settings, task),
        init_from=after[-1].out if after else None,
    )


def _eval_tokens(settings: TaskSettings, task: Task) -> int:
    rows = settings.validation_rows
    return TrainingConfig.eval_tokens if rows is None else rows * task.longest


def _check_measurable(task: Task, settings: TaskSettings) -> None:
    """Refuse before training what could not be measured after it.

    Raises:
        ValueError: rows of a length that the task has not, or a state where nothing is decoded.
    """
    for length in settings.lengths:
        next(iter(at(task, length).held_out("test", 1, 1)))
    if settings.state_at and task.asks != "next":
        raise ValueError(f"state_at: expected none where nothing is decoded token by token, found {settings.state_at}")
    check_at_least_one(**{f"state_at: {tokens}": tokens for tokens in settings.state_at})


def at(task: Task, length: int) -> Task:
    """The same task with rows of another length."""
    assert isinstance(task, GeneratedTask)
    return type(task)(**{**task.options(), "length": length})


def nearby_options(mechanism: str, tokens: int) -> dict[str, int]:
    """So many tokens for chunks, windows and samples that the mechanism has by default; none when it is 0."""
    parameters = inspect.signature(attention.mechanism_class(mechanism)).parameters
    counted = [name for name in _NEARBY if name in parameters and parameters[name].default is not None]
    return dict.fromkeys(counted, tokens) if tokens else {}


def training_of(
    mechanism: str,
    options: Mapping[str, Any],
    seed: int,
    settings: TaskSettings,
    folder: Path,
    task: Task,
    **changes: Any,
) -> TrainingConfig:
    """A training run on the task in a folder, beside it in `run`.

    Args:
        mechanism, options: of attention.
        seed, settings: of the study.
        folder: of the study's run.
        task: that of the folder.
        **changes: other options of `TrainingConfig`.
    """
    given = {
        "head_gate": False,  # as the first records have it, made before presets had gates
        "steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "eval_tokens": _eval_tokens(settings, task),
        **settings.training,
        "out": folder / "run",
        **changes,
    }
    every = max(1, given["steps"] // settings.evaluations)
    return TrainingConfig(
        data=folder / "task",
        resume=True,
        preset=settings.preset,
        layers=settings.layers,
        attention=mechanism,
        attention_options=options,
        batch_size=settings.batch_size,
        eval_every=every,
        save_every=every,
        seed=seed,
        tensorboard=False,
        device="auto",
        **given,
    )


def _run(config: TrainingConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train to the end; returns what its metrics say of steps and of evaluations.

    Raises:
        Stopped: before its end; it can be gone on with.
    """
    require_finished(train(config))
    lines = RunFolder(config.out).open_metrics().read()
    trained, evaluated = ([line for line in lines if line["kind"] == kind] for kind in ("train", "evaluation"))
    return trained, evaluated


def _measured(model: Any, task: Task, settings: TaskSettings) -> dict[str, Any]:
    rows = max(1, min(settings.batch_size, settings.batch_size * 512 // task.longest))
    return dataclasses.asdict(measure_answers(model, task.held_out("test", rows, settings.test_rows)))


@torch.no_grad()
def state_bytes(model: Any, tokens: int) -> int:
    """Bytes of the states of all layers after one row of so many tokens, read in spans."""
    state = model.init_state(1)
    for span in torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device).split(_SPAN, dim=1):
        _, state = model.extend_hidden(span, state)
    return sum(layer.nbytes for layer in state.layers)


def _row(one: Record, lengths: Sequence[int], states: Sequence[int], *, whole: bool) -> list[str]:
    before = sum(part["steps"] for part in one["settings"].get("shorter", ()))
    learned = next((str(step) for step, _, accuracy in one["curve"] if accuracy >= 0.99 and step > before), "never")
    at_lengths = [one["lengths"].get(str(length)) for length in lengths]
    share = "whole_rows" if whole else "accuracy"
    return [
        one["row"],
        str(one["seed"]),
        number(100 * one["test"]["accuracy"], 1),
        *([number(100 * one["test"]["whole_rows"], 1)] if whole else []),
        "-" if one["test"]["loss"] is None else f"{one['test']['loss']:.2g}",
        learned,
        *(number(None if found is None else 100 * found[share], 1) for found in at_lengths),
        f"{one['parameters']:,}",
        number(one["seconds"], 0),
        *(number(found / 1e3 if found else None, 0) for found in map(one.get("state_bytes", {}).get, map(str, states))),
    ]
