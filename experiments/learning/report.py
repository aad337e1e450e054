"""The table and the plot of the forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.study.presentation import Line, markdown_table, number, plot_lines

_HEADER = ("form", "seeds", "loss", "new", "near", "far", "far, far field removed", "chunk start", "share", "s")


def report(records: Sequence[Mapping[str, Any]], folder: Path, labels: Mapping[str, str]) -> str:
    """Write table.md and validation.png into the folder; returns the table.

    Args:
        records: all that are finished.
        folder: of the results.
        labels: by the forms' names.
    """
    by_form = {name: [one for one in records if one["form"] == name] for name in labels}
    rows = [_row(labels[name], found) for name, found in by_form.items() if found]
    table = markdown_table(_HEADER, rows)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    lines = [
        Line(labels[one["form"]], *zip(*one["validation"], strict=True)) for found in by_form.values() for one in found
    ]
    plot_lines(folder / "validation.png", lines, xlabel="step", ylabel="validation loss, nats a token")
    return table


def _row(label: str, found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    figures = [_spread([one.get(name) for one in found]) for name in ("loss", "new", "near", "far", "far_without")]
    shares = [share for one in found for heads in one.get("shares", {}).values() for share in heads]
    return (
        label,
        str(len(found)),
        *figures,
        _spread([one["chunk_start"] for one in found]),
        f"{min(shares):.2f} to {max(shares):.2f}" if shares else "-",
        number(mean(one["seconds"] for one in found), 0),
    )


def _spread(values: Sequence[float | None]) -> str:
    """The mean over seeds, and behind it their standard deviation."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    return number(mean(present)) + (f" ± {stdev(present):.3f}" if len(present) > 1 else "")
