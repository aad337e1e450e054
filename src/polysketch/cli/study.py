"""`polysketch study NAME`: the papers' experiments, each by one command that goes on where it was stopped."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from polysketch.cli.json_values import fits, told

__all__ = ["StudyFlags", "run"]


@dataclass(frozen=True)
class StudyFlags:
    """Make the runs of a study that are missing, and show table, plot and one line: what the paper says, what we found.

    Every run leaves one record, a JSON file with its settings, curve, machine, versions and commit. A study that was
    stopped or killed goes on by the same command. Share it out over processes by --only and --seeds.

    Examples:
      polysketch study --list
      polysketch study reversal --size smoke
      polysketch study induction --size cpu --only polysketch --seeds 0 1 2
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """Which study."""

    list: bool = False
    """Show every table of the papers with the state of its study, or why there is none."""

    size: str = "smoke"
    """smoke: seconds. cpu: what two cores do in an evening or a few. gpu: one GPU. paper: the paper's own sizes."""

    only: tuple[str, ...] = ()
    """Rows to make; where rows are mechanisms, with other options too: polysketch+window=32. Default: all."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of weights and data."""

    set: tuple[str, ...] = ()
    """Settings of the size to change, each as NAME=VALUE in JSON: steps=100. Records then stand in a folder of their
    own, named after the changes."""

    out: Path = Path("runs/studies")
    """Folder of the runs."""

    results: Path = Path("studies")
    """Folder of records, plots and tables; those of smoke runs stay with the runs."""

    threads: int | None = None
    """CPU threads. Default: PyTorch's choice."""


def run(flags: StudyFlags) -> int:
    """Make and show a study, or list all of them.

    Args:
        flags: the command line.

    Returns:
        Exit status 0.

    Raises:
        ValueError: no such study, size, row or setting, or a record that was made with other settings.
    """
    from polysketch.studies.catalogue import check_name, study_called
    from polysketch.studies.listing import listed

    if flags.list:
        print(listed(flags.results))
        return 0
    if flags.name is None:
        raise ValueError("expected the name of a study, or --list, found neither")
    check_name(flags.name)
    from polysketch.studies.study import Places, changed, run_study
    from polysketch.training.environment import use_threads

    study = study_called(flags.name)
    settings = _settings(study.sizes, flags)
    for row in flags.only:
        try:
            study.check_row(row)
        except ValueError as error:
            raise ValueError(f"--only: {error}") from None
    size = changed(flags.size, flags.set)
    places = Places.of(flags.name, size, flags.out, flags.results)
    with use_threads(flags.threads):
        rows = flags.only or tuple(study.rows)
        print(run_study(flags.name, study, size, places, rows=rows, seeds=flags.seeds, settings=settings))
    return 0


def _settings(sizes: Any, flags: StudyFlags) -> Any:
    """The settings of the size, with those that --set changes."""
    if flags.size not in sizes:
        raise ValueError(f"--size: expected one of {', '.join(sizes)}, found {flags.size!r}")
    settings = sizes[flags.size]
    hints = get_type_hints(type(settings))
    known = [field.name for field in dataclasses.fields(settings)]
    changes = {}
    for text in flags.set:
        name, _, value = text.partition("=")
        if name not in known:
            raise ValueError(f"--set {text}: expected NAME=VALUE with one of {', '.join(known)}")
        try:
            changes[name] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"--set {text}: expected a value in JSON, found {value!r}") from error
        if not fits(changes[name], hints[name]):
            raise ValueError(f"--set {text}: expected {told(hints[name])}, found {value} in JSON")
    return dataclasses.replace(settings, **changes)
