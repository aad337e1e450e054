"""What a carried state is worth: the same model trained on long documents with `--carry-state` and without."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polysketch.data import PreparedData
from polysketch.evaluation import evaluate
from polysketch.models import TransformerLM
from polysketch.ops.arguments import check_at_least_one
from polysketch.studies.presentation import Line, number, plot_lines
from polysketch.studies.study import Record, Study, Verdict
from polysketch.studies.texts import books
from polysketch.studies.trained import trained
from polysketch.training import TrainingConfig, load_model
from polysketch.training.environment import resolve_device
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from polysketch.training.trainer import build_model

_CARRIED, _APART = "carried", "rows-apart"
_WARM_UP = 3  # steps whose times do not count
_SPAN = 1024


@dataclass(frozen=True)
class CarriedSettings:
    """One size of the study.

    Attributes:
        tokenizer: specification of the tokenizer that is trained on the books.
        books_per_split: books of each split to take.
        cut_text: bytes of a document.
        layers: of the preset tiny.
        attention: mechanism, with its default options.
        context: tokens of a row.
        batch_size: rows of a step, and so lanes.
        steps, learning_rate: of training.
        edges: positions between which losses are averaged.
        documents: of the test split, of those that are as long as the last edge.
        timed_steps: steps of each way whose times are compared; at least four.
    """

    tokenizer: str = "bpe:512"
    books_per_split: int = 40
    cut_text: int = 20_000
    layers: int = 2
    attention: str = "polysketch"
    context: int = 128
    batch_size: int = 16
    steps: int = 200
    learning_rate: float = 3e-3
    edges: tuple[int, ...] = (0, 128, 1024, 4096)
    documents: int = 16
    timed_steps: int = 25

    def __post_init__(self) -> None:
        counts = ("books_per_split", "cut_text", "layers", "context", "batch_size", "steps", "documents")
        check_at_least_one(**{name: getattr(self, name) for name in counts})
        edges = tuple(self.edges)
        if len(edges) < 2 or edges[0] < 0 or any(later <= earlier for earlier, later in pairwise(edges)):
            raise ValueError(f"edges: expected two positions or more, from 0 on and rising, found {edges}")
        if self.timed_steps < _WARM_UP + 1:
            raise ValueError(f"timed_steps: expected at least {_WARM_UP + 1}, found {self.timed_steps}")


class CarriedStudy(Study):
    """Both ways train as many steps of as many tokens; documents are read with the state carried along for both.

    A record has the loss between each two positions, and that of a carried state the time of a step on a CPU: steps of
    both ways alternate in one process, and the ratio is the median over neighbours, in seconds of the process.
    """

    claim = "A carried state lowers the loss of long documents far beyond the context of training."
    paper = "none, the question is our own"
    rows = needs = (_APART, _CARRIED)
    sizes: Mapping[str, CarriedSettings] = {
        "smoke": CarriedSettings(
            tokenizer="bytes",
            books_per_split=1,
            cut_text=2000,
            context=16,
            batch_size=2,
            layers=1,
            steps=2,
            documents=2,
            edges=(0, 16, 64),
            timed_steps=4,
        ),
        "cpu": CarriedSettings(),
        "gpu": CarriedSettings(
            tokenizer="bpe:8192",
            books_per_split=1000,
            cut_text=400_000,
            layers=8,
            context=1024,
            batch_size=64,
            steps=2000,
            edges=(0, 1024, 8192, 65_536),
        ),
    }

    def depends_on(self, row: str, seed: int, settings: CarriedSettings) -> dict[str, Any]:
        """As the base class has it."""
        return {**dataclasses.asdict(settings), "carry_state": row == _CARRIED, "seed": seed}

    def make(self, row: str, seed: int, settings: CarriedSettings, folder: Path) -> dict[str, Any]:
        """Train one way, and measure it on long documents."""
        data = books(settings.tokenizer, folder.parent, per_split=settings.books_per_split, cut_text=settings.cut_text)
        run = trained(_training(row, seed, settings, data.folder, folder / "run"))
        model, _ = load_model(folder / "run", device=resolve_device("auto"))
        documents = long_documents(data, settings.edges[-1], settings.documents)
        losses = by_position(model, documents, settings.edges)
        timed = row == _CARRIED and resolve_device("auto").type == "cpu"  # by seconds of the process
        cost = {"cost": _cost(settings, data.folder, folder)} if timed else {}
        return {"text": data.sha256, "seconds": run["seconds"], "losses": losses, **cost}

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each record."""
        ranges = [f"{start:,} to {end - 1:,}" for start, end in pairwise(records[0]["settings"]["edges"])]
        heading = ["training", "seed", *(f"nats at {each}" for each in ranges), "times as long a step"]
        return heading, [
            [
                one["row"],
                str(one["seed"]),
                *(number(loss, 4) for loss in one["losses"]),
                number(one.get("cost", {}).get("ratio"), 2),
            ]
            for one in records
        ]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Loss by position."""
        lines = [
            Line(one["row"], range(1, len(one["losses"]) + 1), one["losses"], dashed=one["row"] == _APART)
            for one in records
        ]
        edges = records[0]["settings"]["edges"]
        xlabel = f"range of positions, between {', '.join(f'{edge:,}' for edge in edges)}"
        plot_lines(folder / "loss-by-position.png", lines, xlabel=xlabel, ylabel="nats a token")

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By the mean over seeds of the difference at the furthest positions."""
        found = differences(records)
        if not found:
            return Verdict(f"{records[0]['row']} {records[0]['losses'][-1]:.3f} nats", None)
        last = [each[-1] for each in found]
        middle = statistics.mean(last)
        return Verdict(f"{middle:+.3f} nats ({min(last):+.3f} to {max(last):+.3f})", middle < 0)


CARRIED = CarriedStudy()


def differences(records: Sequence[Record]) -> list[list[float]]:
    """For every seed that has both ways, what a carried state adds to the losses."""
    by_way = {way: {one["seed"]: one["losses"] for one in records if one["row"] == way} for way in (_CARRIED, _APART)}
    carried, apart = by_way.values()
    both = carried.keys() & apart.keys()
    return [[one - other for one, other in zip(carried[seed], apart[seed], strict=True)] for seed in sorted(both)]


def _training(row: str, seed: int, settings: CarriedSettings, data: Path, out: Path) -> TrainingConfig:
    return TrainingConfig(
        data=data,
        out=out,
        resume=True,
        preset="tiny",
        layers=settings.layers,
        attention=settings.attention,
        head_gate=False,  # as the first records have it, made before presets had gates
        context=settings.context,
        batch_size=settings.batch_size,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        pack="documents",
        carry_state=row == _CARRIED,
        seed=seed,
        device="auto",
        eval_every=0,
        save_every=max(1, settings.steps // 5),
        tensorboard=False,
    )


def long_documents(data: PreparedData, length: int, count: int) -> list[np.ndarray]:
    """The first `length` + 1 tokens of documents of the test split that have so many, `count` of them at most.

    Raises:
        ValueError: there is none.
    """
    tokens = data.split("test").tokens
    ends = np.flatnonzero(tokens[:] == data.description.end_of_text)
    starts = np.append(0, ends[:-1] + 1)
    long = [start for start, end in zip(starts, ends, strict=True) if end - start > length]
    if not long:
        raise ValueError(f"expected a document of more than {length} tokens in the test split, found none")
    return [np.asarray(tokens[start : start + length + 1]) for start in long[:count]]


def by_position(model: TransformerLM, documents: Sequence[np.ndarray], edges: Sequence[int]) -> list[float]:
    """Mean loss in nats between each two edges, the documents read from their beginnings with the state carried."""
    found = [
        evaluate(model, tokens, context_length=edges[-1], span=_SPAN, batch_size=1).loss_at_position
        for tokens in documents
    ]
    losses = np.mean(found, axis=0)
    return [float(losses[start:stop].mean()) for start, stop in pairwise(edges)]


def _cost(settings: CarriedSettings, data: Path, folder: Path) -> dict[str, Any]:
    """Seconds of steps of both ways, alternated."""
    plans = {row: make_plan(_training(row, 99, settings, data, folder / f"timed-{row}")) for row in CARRIED.rows}
    updaters: dict[str, Updater] = {}
    rows: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {row: [] for row in plans}
    for row, plan in plans.items():
        torch.manual_seed(0)
        updaters[row] = Updater(build_model(plan), plan.config.step_options(), torch.float32)
        rows[row] = plan.goal.rows()
    for step in range(settings.timed_steps):
        for row, updater in updaters.items():
            started = time.process_time()
            updater.compute_gradient(rows[row].batch(step, settings.batch_size))
            updater.apply(step)
            seconds[row].append(time.process_time() - started)
    settled = {row: times[_WARM_UP:] for row, times in seconds.items()}
    ratios = [one / other for one, other in zip(settled[_CARRIED], settled[_APART], strict=True)]
    medians = {row: statistics.median(times) for row, times in settled.items()}
    return {"ratio": statistics.median(ratios), "medians": medians, "seconds": seconds}
