"""The benchmark of threads: its record, and its arithmetic."""

import json

import pytest
import torch
from benchmarks.threads import Shape, most

from benchmarks import threads


@pytest.mark.parametrize(
    ("shape", "count", "gain"),
    [
        (Shape(1, 12, 16_384), 1, 1.0),
        (Shape(1, 12, 16_384), 2, 2.0),
        (Shape(1, 12, 16_384), 8, 6.0),  # twelve heads take two turns
        (Shape(1, 12, 16_384), 64, 32.0),  # four spans of each, with half as much work again
        (Shape(1, 1, 16_384), 2, 2 / 1.5),
        (Shape(1, 1, 1_024), 2, 1.0),  # too short for spans
        (Shape(64, 12, 512), 64, 64.0),
    ],
)
def test_a_thread_takes_whole_pieces(shape, count, gain):
    before = torch.get_num_threads()
    assert most(shape, count) == pytest.approx(gain)
    assert torch.get_num_threads() == before


def test_a_record_has_every_number_of_threads_and_what_arithmetic_allows(tmp_path, capsys):
    before, out = torch.get_num_threads(), tmp_path / "threads.json"
    threads.main(["--threads", "1", "2", "--repeats", "2", "--shapes", "1x2x300", "--out", str(out)])
    rows = json.loads(out.read_text())["measurements"]
    assert [(row["series"], row["threads"]) for row in rows] == [
        *(("sdpa", 1), ("sdpa", 2), ("features given", 1), ("features given", 2)),
        ("by arithmetic", ""),
    ]
    assert [len(row["all_seconds"]) for row in rows[:4]] == [2, 2, 2, 2]
    assert rows[0]["gain"] == 1.0
    assert rows[4]["at_most"]["2"] == 2.0
    assert "by arithmetic" in capsys.readouterr().out
    assert torch.get_num_threads() == before
