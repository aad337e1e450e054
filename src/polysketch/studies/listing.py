"""What `polysketch study --list` shows: every table of the papers with its state.

PyTorch is loaded where there are records: which rows a study has depends on what mechanisms can do.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polysketch.studies.catalogue import ENTRIES, Entry, study_called
from polysketch.studies.summaries import SUMMARY_FILE, read_summary, rows_in, state_of

if TYPE_CHECKING:
    from polysketch.studies.study import Study

_COLUMNS = 80  # of a terminal


def listed(results: Path) -> str:
    """A line or two for each table or figure: where it is from, its claim, and the state of its study.

    Args:
        results: where studies keep their records.

    Raises:
        ValueError: a file that is no summary.
    """
    return "\n".join(
        _filled(f"{one.source}: {one.claim}", "") + "\n" + _filled(_state(one, results), "    ") for one in ENTRIES
    )


def _filled(text: str, indent: str) -> str:
    """Lines that fit a terminal, the later ones further in."""
    return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _state(entry: Entry, results: Path) -> str:
    """By size, how many rows have records and what they say; or why there is no study."""
    if not entry.study:
        return entry.why_not
    folders = with_records(entry.study, results)
    if not folders:
        return f"{entry.study}: no record in {results}"
    return f"{entry.study}: {' | '.join(_told(study_called(entry.study), folders))}"


def with_records(name: str, results: Path) -> list[Path]:
    """Folders with a summary of the study of that name.

    Raises:
        ValueError: a file that is no summary.
    """
    files = sorted(results.glob(f"{name}-*/{SUMMARY_FILE}"))
    return [file.parent for file in files if read_summary(file)["study"] == name]


def _told(study: Study, folders: list[Path]) -> Iterator[str]:
    """A part for each size with records, then one for each of the paper's own without any."""
    sizes = set()
    for folder in folders:
        summary = read_summary(folder / SUMMARY_FILE)
        sizes.add(summary["size"])
        made = f"{_size(study, summary['size'])}: {_counted(study, rows_in(folder))}"
        yield f"{made}; {summary['ours']}; {state_of(summary)}"
    yield from (f"{_size(study, size)}: no record" for size in study.sizes if is_papers(size) and size not in sizes)


def is_papers(size: str) -> bool:
    """Whether a size is a paper's own."""
    return size.startswith("paper")


def _size(study: Study, size: str) -> str:
    told = size_told(study, size)
    return f"{size} ({told})" if told else size


def size_told(study: Study, size: str) -> str:
    """`told_size` of a size, or of the one that it changes; nothing where the study has no such size any more."""
    settings = study.sizes.get(size.partition("+")[0])
    return "" if settings is None else study.told_size(settings)


def _counted(study: Study, runs: list[str]) -> str:
    """The study's own rows, then others."""
    made, own = set(runs), set(study.rows)
    more = f" and {len(made - own)} more" if made - own else ""
    return f"{len(made & own)} of {len(own)} rows{more}, {len(runs)} run{'s' if len(runs) > 1 else ''}"
