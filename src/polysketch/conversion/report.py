"""The report of a conversion: what replacing attention cost, and what each stage regained."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.conversion.stages import DISTILLATION, ORIGINAL, REPLACED, TRANSFER, TUNING
from polysketch.plotting import loss_by_position, picture

_LEAST_GAP = 0.01  # nats: dividing by less would make a share of noise
_TITLES = {  # in their order
    ORIGINAL: "softmax attention, as it was",
    REPLACED: "after replacing it",
    TRANSFER: "after attention transfer",
    DISTILLATION: "after distillation",
    TUNING: "after fine-tuning",
}


def build_report(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all stages, with the share of the perplexity gap that each has regained.

    Args:
        figures: as `ConversionTask.figures` gives them: `original`, `replaced`, and the stages that are over.

    Returns:
        `stages`, a list in their order, each with `regained`: (replaced - now) / (replaced - original), in perplexity.
        1 is all of it, more than 1 better than before; None where replacing cost less than 0.01 nats, or a perplexity
        is not finite. Fine-tuning is further training too: compare with softmax attention tuned for as long.
    """
    stages = [dict(figures[stage]) for stage in _TITLES if stage in figures]
    for line in stages:
        line["regained"] = _regained(figures[ORIGINAL], figures[REPLACED], line)
    return {"stages": stages, "regained": stages[-1]["regained"]}


def _regained(original: Mapping[str, Any], replaced: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    first, worst, found = (line["perplexity"] for line in (original, replaced, now))
    if None in (first, worst, found) or worst < first * math.exp(_LEAST_GAP):
        return None
    return (worst - found) / (worst - first)


def report_table(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{'':<32}{'loss':>8}{'perplexity':>14}{'regained':>10}"]
    for line in report["stages"]:
        regained = "" if line["stage"] in (ORIGINAL, REPLACED) else _percent(line["regained"])
        loss, perplexity = _number(line["loss"], 4), _number(line["perplexity"], 3)
        lines.append(f"{_TITLES[line['stage']]:<32}{loss:>8}{perplexity:>14}{regained:>10}")
    return "\n".join(
        [*lines, "regained: of the perplexity that replacing cost; fine-tuning gains as further training too"]
    )


def _number(value: float | None, digits: int) -> str:
    return "infinite" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def plot_report(stages: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the loss by position of every stage into `path`.

    Raises:
        ImportError: Matplotlib is missing; the message has the pip command.
    """
    with picture(path) as axes:
        for line in stages:
            values, edges, title = line["loss_by_position"], line["position_edges"], _TITLES[line["stage"]]
            axes.stairs(values, edges, baseline=None, linewidth=2, label=title)
        loss_by_position(axes, stages[0]["position_edges"])
