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

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.foundation.recall_training import RecallRun, RecallTask
from experiments.foundation.variants import Variant
from experiments.mechanisms.variants import VARIANTS, chosen
from experiments.study import kept
from experiments.study.command import RESULTS, of_size, run_command, with_overrides
from experiments.study.presentation import Line, markdown_table, number, plot_lines
from polysketch.models import TransformerLM

SIZES = {
    "smoke": RecallTask(
        length=32, pairs=2, vocabulary=16, local_chunk=4, minimum_gap=8, batch_size=4, steps=2, eval_every=2
    ),
    "cpu": RecallTask(length=64, pairs=4, vocabulary=32, minutes=120.0),  # the steps decide, also on a busy machine
}
_STATE_TOKENS = {"smoke": (32, 64), "cpu": (1_024, 8_192)}
_SPAN = 512  # tokens read at once to fill a state
_COLOURS = 10  # of Matplotlib's cycle; lines beyond them are dashed


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
        name = (
            f"{variant.name}-seed{task.seed}" if flags.pairs is None else f"{variant.name}-{task.pairs}-seed{task.seed}"
        )
        found = _finish(name, task, variant, _STATE_TOKENS[flags.size], out, results)
    print(show(found, results))
    return 0


def _finish(
    name: str, task: RecallTask, variant: Variant, state_tokens: Sequence[int], out: Path, results: Path
) -> list[dict[str, Any]]:
    """Make or keep one record; returns all records in the results."""
    options = variant.attention_options(local_chunk=task.local_chunk, num_heads=task.num_heads)
    settings = {**dataclasses.asdict(task), "attention": options}
    path = out / f"{name}.json"
    if path.is_file():
        print(f"{name}: finished before, kept in {path}")
    make = functools.partial(_make, task, variant, state_tokens)
    return kept.publish(kept.kept_or_made(path, settings, make), name, results)


def _make(task: RecallTask, variant: Variant, state_tokens: Sequence[int]) -> dict[str, Any]:
    """Train, and measure the processor's time and the state that decoding would carry."""
    recall_run = RecallRun(task, variant, functools.partial(print, flush=True))
    started = time.process_time()
    figures = recall_run.train()
    figures["processor_seconds_per_step"] = (time.process_time() - started) / figures["steps"]
    bytes_by_tokens = {str(tokens): state_bytes(task, variant, tokens) for tokens in state_tokens}
    named = {"variant": variant.name, "label": variant.label, "provenance": kept.provenance()}
    return {**named, **figures, "state_bytes": bytes_by_tokens}


@torch.no_grad()
def state_bytes(task: RecallTask, variant: Variant, tokens: int) -> int:
    """Bytes of the states of all layers after one row of so many tokens, in float32."""
    model = TransformerLM(task.model(variant).config).eval()  # the trained model's convolution cannot decode
    state = model.init_state(1)
    for span in torch.zeros(1, tokens, dtype=torch.int64).split(_SPAN, dim=1):
        _, state = model.extend_hidden(span, state)
    return sum(layer.nbytes for layer in state.layers)


def show(found: Sequence[dict[str, Any]], results: Path) -> str:
    """Write plot and table of all records, and return the table."""
    order = list(VARIANTS)
    found = sorted(found, key=lambda record: (order.index(record["variant"]), *_task(record)))
    plot_lines(
        results / "accuracy.png",
        [_line(record, dashed=place >= _COLOURS) for place, record in enumerate(found)],
        xlabel="step",
        ylabel="accuracy on held-out queries (%)",
        ylim=(-2, 102),
    )
    state_tokens = list(found[0]["state_bytes"])
    header = (*_HEADER, *(f"state KB, {int(tokens):,} tokens" for tokens in state_tokens))
    table = markdown_table(header, [_row(record) for record in found])
    (results / "table.md").write_text(table + "\n", encoding="utf-8")
    return table


_HEADER = ("mechanism", "options", "pairs", "seed", "accuracy %", "steps", "solved at", "parameters", "CPU s/step")


def _task(record: dict[str, Any]) -> tuple[int, int]:
    """Pairs and seed."""
    return record["settings"]["pairs"], record["settings"]["seed"]


def _line(record: dict[str, Any], *, dashed: bool) -> Line:
    points = record["curve"]
    return Line(record["label"], [one["step"] for one in points], [100 * one["accuracy"] for one in points], dashed)


def _row(record: dict[str, Any]) -> list[str]:
    options = record["settings"]["attention"]
    return [
        record["variant"],
        " ".join(f"{name}={value}" for name, value in options.items()) or "defaults",
        *map(str, _task(record)),
        number(100 * record["accuracy"], 1),
        str(record["steps"]),
        str(record["solved_at_step"] or "never"),
        f"{record['parameters']:,}",
        number(record["processor_seconds_per_step"], 2),
        *(number(size / 1e3, 0) for size in record["state_bytes"].values()),
    ]


if __name__ == "__main__":
    sys.exit(run_command("experiments.mechanisms.recall", run))
