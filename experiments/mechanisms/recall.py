"""Recall from far away by every causal mechanism: multi-query associative recall, one budget, one table.

    python -m experiments.mechanisms.recall --size cpu

Every mechanism has its default options, except that chunks, windows and samples are as long as the local chunk (16
tokens): every answer lies at least two of them before its question, so that attention to nearby tokens alone cannot
find it. Each trains on the same fresh batches until it answers 99.7 % of held-out queries or has made its 600 steps;
on one core that is up to two minutes for most, five for polysketch. A finished mechanism is kept in --out: after an
interruption the same command goes on with the next one, and several processes may share the work with --only. Records
(JSON), the plot accuracy.png and table.md go to experiments/results/recall-mechanisms; the table is also printed. CPU
s/step is the processor's time, evaluations included: other programs do not count, so run one thread a process.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.mechanisms.comparison import (
    COSTS,
    NAMES,
    STATE_TOKENS,
    Column,
    Record,
    by_mechanism,
    finish,
    first_step,
    percent,
    setting,
    show,
)
from experiments.mechanisms.variants import VARIANTS, chosen
from experiments.study.command import RESULTS, of_size, run_command, with_overrides
from experiments.synthetic.recall import RecallTask
from experiments.synthetic.training import SOLVED

SIZES = {
    "smoke": RecallTask(
        length=32, pairs=2, vocabulary=16, local_chunk=4, minimum_gap=8, batch_size=4, steps=2, eval_every=2
    ),
    "cpu": RecallTask(length=64, pairs=4, vocabulary=32, eval_every=10, minutes=120.0),  # the steps decide
}


@dataclass(frozen=True)
class MechanismRecallFlags:
    """Train every causal mechanism on recall. Flags left out take the value of the size."""

    size: Literal["smoke", "cpu"]
    """smoke: seconds, to see that everything runs. cpu: minutes for each mechanism."""

    only: tuple[str, ...] = tuple(VARIANTS)
    """Mechanisms to run."""

    out: Path = Path("runs/recall-mechanisms")
    """Folder of finished runs."""

    results: Path | None = None
    """Folder for records, plot and table. Default: experiments/results/recall-mechanisms, for smoke OUT/results."""

    pairs: int | None = None
    """Key-value pairs of a sequence; they are part of a record's name then."""

    length: int | None = None
    """Positions of a sequence."""

    steps: int | None = None
    """Steps of each run at most."""

    minutes: float | None = None
    """Minutes for each run at most."""

    learning_rate: float | None = None
    """AdamW's, after the warm-up."""

    seed: int | None = None
    """Of weights and data."""

    rotary: bool | None = None
    """Whether queries and keys have rotary positions; without them it is part of a record's name."""

    threads: int | None = None
    """CPU threads; PyTorch's choice when left out."""


def run(flags: MechanismRecallFlags) -> int:
    """Run what is not finished yet, and show everything there is."""
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    task, out = with_overrides(of_size(SIZES, flags.size), flags), flags.out / flags.size
    results = flags.results or (out / "results" if flags.size == "smoke" else RESULTS / "recall-mechanisms")
    found: list[dict[str, Any]] = []
    for variant in chosen(flags.only):
        found = finish(_name(variant.name, task, flags), task, variant, STATE_TOKENS[flags.size], out, results)
    print(show_recall(found, results))
    return 0


def _name(variant: str, task: RecallTask, flags: MechanismRecallFlags) -> str:
    """Of a record: what is not as it mostly is stands in it."""
    pairs = "" if flags.pairs is None else f"-{task.pairs}"
    return f"{variant}{'' if task.rotary else '-unrotated'}{pairs}-seed{task.seed}"


def show_recall(found: Sequence[Record], results: Path) -> str:
    """Write plot and table of all records, and return the table."""
    ordered = by_mechanism(found, lambda record: (record["settings"]["pairs"], record["settings"]["seed"]))
    return show(ordered, results, _COLUMNS)


_COLUMNS: dict[str, Column] = {
    **NAMES,
    "pairs": setting("pairs"),
    "seed": setting("seed"),
    "rotary": lambda record: "yes" if record["settings"].get("rotary", True) else "no",
    "accuracy %": percent("accuracy"),
    "steps": lambda record: str(record["steps"]),
    "solved at": first_step(SOLVED),
    **COSTS,
}


if __name__ == "__main__":
    sys.exit(run_command("experiments.mechanisms.recall", run))
