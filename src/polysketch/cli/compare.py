"""`polysketch compare RUN RUN`: training runs side by side."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["CompareFlags", "run"]


@dataclass(frozen=True)
class CompareFlags:
    """Compare training runs: what each is, how far it came, its validation loss. Also while they go on.

    The best comes first. Losses are compared only between runs that learn the same of the same data; a note says where
    they were measured otherwise, for instance on more tokens.

    Examples:
      polysketch compare runs/softmax runs/polysketch --plot losses.png
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of training runs."""

    plot: Path | None = None
    """Draw the validation losses into this file: .png, .pdf or .svg."""

    json: bool = False
    """Print everything as one JSON object on the last line."""


def run(flags: CompareFlags) -> int:
    """Print a table of the runs, best first, and draw their losses.

    Args:
        flags: the command line.

    Returns:
        Exit status 0.

    Raises:
        FileNotFoundError: a folder is no run.
        ValueError: no run is named, one was named twice, one is damaged, or two have other data or another objective.
    """
    from polysketch.cli.output_files import check_plot
    from polysketch.training.comparison import compared, comparison_table, differences, plot_comparison

    check_plot(flags.plot)
    if not flags.runs:
        raise ValueError("expected at least one run to compare, found none")
    if len(set(flags.runs)) < len(flags.runs):
        raise ValueError(f"expected each run once, found one twice in {', '.join(map(str, flags.runs))}")
    runs = [compared(folder) for folder in flags.runs]
    other = next((one for one in runs if one.data != runs[0].data), None)
    if other is not None:
        raise ValueError(
            f"expected runs of the same data, found other data in {other.folder} than in {runs[0].folder}: "
            "their losses mean different things"
        )
    other = next((one for one in runs if one.objective != runs[0].objective), None)
    if other is not None:
        raise ValueError(
            f"expected runs of one objective, found {other.objective} in {other.folder} and {runs[0].objective} in "
            f"{runs[0].folder}: their losses mean different things"
        )
    for line in [*comparison_table(runs), *differences(runs)]:
        print(line)
    if flags.plot is not None:
        plot_comparison(runs, flags.plot)
        print(f"plot in {flags.plot}")
    if flags.json:
        print(json.dumps([{**dataclasses.asdict(one), "folder": str(one.folder)} for one in runs]))
    return 0
