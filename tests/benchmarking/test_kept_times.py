"""The records of times in the repository, made by earlier commits, are drawn by the code as it is."""

import json
from pathlib import Path

import pytest

from polysketch.benchmarking.plot import plot_time_per_token

TIMES = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FIRST = "cpu-20261120-131246"  # does not say of how many tokens a time is


def measurements(path: Path) -> list[dict]:
    """Of a record of one benchmark, or of every section of one."""
    record = json.loads(path.read_text())
    sections = record["sections"].values() if "sections" in record else [record]
    return [one for section in sections for one in section["measurements"]]


def is_by_length(path: Path) -> bool:
    """Whether the record has times of series at several lengths; others compare rows, spans, threads or commands."""
    if path.stem == FIRST or "measurements" not in path.read_text():
        return False
    found = [one for one in measurements(path) if "direction" in one]
    return bool(found) and all("length" in one or "position" in one for one in found)


RECORDS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (number % 12 != 0))
    for number, path in enumerate(sorted(filter(is_by_length, TIMES.glob("*-2*.json"))))
]


@pytest.mark.parametrize("path", RECORDS)
def test_a_record_of_times_is_drawn(path, tmp_path):
    pytest.importorskip("matplotlib")
    found = [one for one in measurements(path) if "direction" in one]
    plot_time_per_token(found, path.stem, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {one['series']} -->" in drawn for one in found)
