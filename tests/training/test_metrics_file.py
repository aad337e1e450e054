"""Metrics: whole lines, cut back atomically."""

import json
import os

import pytest

from polysketch.training.metrics_file import MetricsFile


@pytest.fixture
def metrics(tmp_path):
    found = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        found.append({"kind": "train", "step": step, "loss": step / 3})
    return found


def test_lines_are_read_back_exactly(metrics):
    assert metrics.read() == [{"kind": "train", "step": step, "loss": step / 3} for step in (1, 2, 3)]


def test_later_lines_are_dropped(metrics):
    metrics.drop_after(2)
    assert [line["step"] for line in metrics.read()] == [1, 2]
    metrics.drop_after(-1)
    assert metrics.path.read_bytes() == b""


@pytest.mark.parametrize("end", [b'{"kind": "tr', b'{"step": 1}', b"\0\0\0\0\n", b"\xff\xfe\n"])
def test_a_torn_or_damaged_end_is_dropped(metrics, end):
    whole = metrics.path.read_bytes()
    metrics.path.write_bytes(whole + end)
    assert len(metrics.read()) == 3
    metrics.drop_after(3)
    assert metrics.path.read_bytes() == whole


def test_dropping_is_atomic(metrics, disk):
    """A fault before any of its operations leaves the old file or the new one."""
    whole = metrics.path.read_bytes()
    for number in range(4):
        metrics.path.write_bytes(whole)
        disk.restart()
        disk.fail_at, disk.torn = number, True
        with pytest.raises(disk.Killed):
            metrics.drop_after(1)
        disk.cut_power()
        assert len(metrics.read()) in (1, 3)


def test_nothing_is_written_when_nothing_is_dropped(metrics, disk):
    metrics.drop_after(3)
    assert disk.log == []


def test_numbers_that_are_not_finite_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"kind": "train", "step": 1, "loss": float("inf"), "perplexity": float("nan")})
    assert json.loads(metrics.path.read_text())["loss"] is None
    assert metrics.read() == [{"kind": "train", "step": 1, "loss": None, "perplexity": None}]


def test_no_file_has_no_lines(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.drop_after(3)
    metrics.sync()
    assert metrics.read() == []


@pytest.mark.parametrize("end", [b"{}\n", b"null\n", b"[1]\n", b'{"step": "1"}\n', b'{"kind": "train"}\n'])
def test_a_line_of_json_that_is_no_metrics_counts_as_damaged(metrics, end):
    whole = metrics.path.read_bytes()
    metrics.path.write_bytes(whole + end)
    assert len(metrics.read()) == 3
    metrics.drop_after(3)
    assert metrics.path.read_bytes() == whole


def test_every_changed_bit_of_a_line_is_found(metrics):
    """Any bit of the line in the middle: nothing is read that was not written, and `damaged` tells the line."""
    written, whole = metrics.read(), metrics.path.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    for place in range(len(first), len(first) + len(second)):
        for bit in range(8):
            metrics.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            assert all(line in written for line in metrics.read()), f"byte {place - len(first)}, bit {bit}"
            assert 2 in metrics.damaged(), f"byte {place - len(first)}, bit {bit}"
    metrics.path.write_bytes(whole)
    assert metrics.damaged() == []
    assert third in whole


def test_lines_of_earlier_versions_have_no_sum(metrics):
    metrics.path.write_bytes(b'{"kind": "train", "step": 1, "loss": 2.5}\n')
    metrics.append({"kind": "evaluation", "step": 2, "stage": "tuning", "loss": 2.25})
    assert [line["loss"] for line in metrics.read()] == [2.5, 2.25]
    assert metrics.damaged() == []


def test_no_line_says_its_sum(metrics):
    assert all("crc32" not in line for line in metrics.read())
    assert metrics.path.read_bytes().count(b'"crc32"') == 3


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_is_refused_at_once(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    os.mkfifo(metrics.path)
    for call in (metrics.read, metrics.damaged, metrics.sync, lambda: metrics.drop_after(1)):
        with pytest.raises(ValueError, match="found a pipe or a device"):
            call()
    with pytest.raises(OSError, match="found a pipe"):
        metrics.append({"kind": "train", "step": 1})


@pytest.fixture
def of_two_runs(tmp_path):
    """Metrics of a run, with a line of another one in the middle, as if two files had been joined."""
    mine, other = (MetricsFile(tmp_path / "metrics.jsonl", identity) for identity in ("a" * 32, "b" * 32))
    for step, metrics in ((1, mine), (2, other), (3, mine), (4, other)):
        metrics.append({"kind": "train", "step": step, "loss": step / 3})
    return mine, other


def test_lines_of_another_run_are_left_out_and_told(of_two_runs):
    mine, _ = of_two_runs
    assert [[line["step"] for line in metrics.read()] for metrics in of_two_runs] == [[1, 3], [2, 4]]
    assert [metrics.damaged() for metrics in of_two_runs] == [[2, 4], [1, 3]]
    assert "run" not in mine.read()[0]
    assert MetricsFile(mine.path).damaged() == [], "of a run without a name, every line is taken"


def test_lines_of_another_run_are_dropped_and_the_file_as_it_was_is_kept(of_two_runs):
    mine, _ = of_two_runs
    content = mine.path.read_bytes()
    first, *_ = content.splitlines(keepends=True)
    assert mine.drop_after(2) == 2
    assert mine.path.read_bytes() == first
    assert mine.path.with_name("metrics-damaged.jsonl").read_bytes() == content


def test_every_line_of_another_run_counts_though_none_is_left(of_two_runs):
    mine, _ = of_two_runs
    stranger = MetricsFile(mine.path, "c" * 32)
    assert stranger.read() == []
    assert stranger.drop_after(9) == 4
    assert mine.path.read_bytes() == b""


def test_lines_that_do_not_say_their_run_are_this_ones(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").append({"kind": "train", "step": 1, "loss": 2.5})
    assert MetricsFile(tmp_path / "metrics.jsonl", "a" * 32).read() == [{"kind": "train", "step": 1, "loss": 2.5}]


def test_a_torn_last_line_is_what_a_kill_leaves_and_no_damage(metrics):
    whole = metrics.path.read_bytes()
    for end in range(1, 40):
        metrics.path.write_bytes(whole[:-end])
        assert metrics.damaged() == []
    lines = whole.splitlines(keepends=True)
    metrics.path.write_bytes(lines[0][:-9] + b"\n" + lines[1])
    assert metrics.damaged() == [1]
