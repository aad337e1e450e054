"""A page of every study, in Markdown, made from its records alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polysketch.studies.catalogue import ENTRIES, STUDIES, study_called
from polysketch.studies.listing import with_records
from polysketch.studies.study import TABLE_FILE
from polysketch.studies.summaries import SUMMARY_FILE, read_summary, state_of


def page(results: Path, link: str) -> str:
    """Every table of the papers, then a section for each study: claim, the paper's figure, command, and its records.

    Args:
        results: where studies keep their records.
        link: how the page leads to that folder; pictures are shown from there.
    """
    tables = ["| table or figure | what it says | study |", "|---|---|---|"]
    for entry in ENTRIES:
        study = f"[{entry.study}](#{entry.study})" if entry.study else entry.why_not
        tables.append(f"| {entry.source} | {entry.claim} | {study} |")
    return "\n\n".join(["\n".join(tables), *(part for name in STUDIES for part in _section(name, results, link))])


def _section(name: str, results: Path, link: str) -> Iterator[str]:
    study = study_called(name)
    yield f"## {name}"
    yield f"{study.claim} Paper: {study.paper}."
    yield f"`polysketch study {name} --size cpu` makes what is missing; sizes: {', '.join(study.sizes)}."
    folders = with_records(name, results)
    for folder in folders:
        yield from _records(folder, f"{link}/{folder.name}")
    if not folders:
        yield "No record yet."


def _records(folder: Path, link: str) -> Iterator[str]:
    summary = read_summary(folder / SUMMARY_FILE)
    yield f"### {summary['study']}, {summary['size']}"
    of_size = f"Size: {summary['told']}. " if summary["told"] else ""
    yield f"{summary['ours']}: {state_of(summary)}. {of_size}Records: `studies/{folder.name}`."
    table, _, _ = (folder / TABLE_FILE).read_text(encoding="utf-8").partition("\n\n")
    yield table
    for picture in sorted(folder.glob("*.png")):
        yield f"![{picture.stem.replace('-', ' ')}]({link}/{picture.name})"
