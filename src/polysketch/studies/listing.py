"""What `polysketch study --list` shows: every table of the papers with its state. Loads no PyTorch."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.studies.catalogue import ENTRIES, Entry
from polysketch.studies.summaries import SUMMARY_FILE, read_summary, state_of

_COLUMNS = 80  # of a terminal
_INDENT = "    "


def listed(results: Path) -> str:
    """The claim of each table or figure, where it is from, and below it the state of its study.

    A study that several tables share tells its state at the first of them.

    Args:
        results: where studies keep their records.

    Raises:
        ValueError: a file that is no summary.
    """
    told: set[str] = set()
    lines = []
    for one in ENTRIES:
        lines += [_filled(f"{one.source}: {one.claim}", ""), *(_filled(*line) for line in _states(one, results, told))]
        told.add(one.study)
    return "\n".join(lines)


def _filled(text: str, indent: str) -> str:
    """Lines that fit a terminal, the later ones further in."""
    return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _states(entry: Entry, results: Path, told: Collection[str]) -> Iterator[tuple[str, str]]:
    """Lines and their indents: by size, how many rows have records and what they say; or why there is no study."""
    if not entry.study:
        yield entry.why_not, _INDENT
    elif entry.study in told:
        yield f"{entry.study}: as above", _INDENT
    else:
        found = [read_summary(folder / SUMMARY_FILE) for folder in with_records(entry.study, results)]
        reads = f"; it reads {entry.reads} in $POLYSKETCH_DATA" if entry.reads else ""
        yield f"{entry.study}:" if found else f"{entry.study}: no record in {results}{reads}", _INDENT
        yield from ((line, 2 * _INDENT) for line in _sizes(found))


def with_records(name: str, results: Path) -> list[Path]:
    """Folders with a summary of the study of that name.

    Raises:
        ValueError: a file that is no summary.
    """
    files = sorted(results.glob(f"{name}-*/{SUMMARY_FILE}"))
    return [file.parent for file in files if read_summary(file)["study"] == name]


def _sizes(summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each size with records, then one for each of the paper's own without any."""
    for one in summaries:
        yield f"{_size(one['size'], one['told'])}: {_counted(one)}; {one['ours']}; {state_of(one)}"
    made = {one["size"] for one in summaries}
    papers = summaries[-1]["papers"] if summaries else {}
    yield from (f"{_size(*size)}: no record" for size in papers.items() if size[0] not in made)


def _size(size: str, told: str) -> str:
    return f"{size} ({told})" if told else size


def _counted(one: Mapping[str, Any]) -> str:
    """The study's own rows, then others."""
    others = one["rows"] - one["own_rows"]
    more = f" and {others} more" if others else ""
    return f"{one['own_rows']} of {one['of_rows']} rows{more}, {one['runs']} run{'s' if one['runs'] > 1 else ''}"
