"""A target has a reason, and who sees it missed reads it; what is wanted is measured; reasons tell what pages tell."""

import math
import re

import pytest
from benchmarks.figures import NOT_FOUND_OUT, Figure, Target
from benchmarks.gpu import targets as gpu_targets
from benchmarks.scale import FULL, QUICK

from benchmarks import ROOT, bfloat16_products, targets
from polysketch.benchmarking import AttentionSettings, DecodingSettings, TrainingSettings
from polysketch.benchmarking.ways import way

WANTED = Target(at_least=5.0, why="the sums are read twice")


def of_tables() -> list[Target]:
    """Every target of the CPU and of GPUs."""
    found = [one for module in (targets, gpu_targets) for one in vars(module).values()]
    found += [target for table in list(found) if isinstance(table, dict) for target in table.values()]
    found += [target for table in list(found) if isinstance(table, dict) for target in table.values()]
    found += [targets.slowest("squared-polynomial"), targets.slowest("llops")]
    return [one for one in found if isinstance(one, Target)]


def test_a_missed_target_prints_its_reason_and_a_reached_one_does_not():
    line, why = Figure("speed", 4.0, target=WANTED).lines
    assert ">= 5 MISSED" in line
    assert why.strip() == "why: the sums are read twice"
    assert Figure("speed", 4.0, target=WANTED).as_json()["why"] == WANTED.why
    (line,) = Figure("speed", 5.0, target=WANTED).lines
    assert ">= 5 reached" in line
    assert Figure("speed", 5.0, target=WANTED).as_json()["why"] is None
    (line,) = Figure("speed", 4.0).lines
    assert "MISSED" not in line


def test_a_target_without_a_reason_or_a_bound_is_refused():
    with pytest.raises(TypeError, match="why"):
        Target(at_least=1.0)
    with pytest.raises(ValueError, match="no reason"):
        Target(at_least=1.0, why=" ")
    with pytest.raises(ValueError, match="neither"):
        Target(why="no bound")


@pytest.mark.parametrize(
    ("value", "reached"), [(0.8, False), (0.9, True), (1.1, True), (1.2, False), (math.nan, False)]
)
def test_a_target_is_reached_within_both_bounds(value, reached):
    target = Target(at_least=0.9, at_most=1.1, why=NOT_FOUND_OUT)
    assert Figure("steady", value, target=target).reached is reached
    assert str(target) == ">= 0.9 and <= 1.1"


def test_numbers_in_reasons_stand_in_the_pages_that_tell_them():
    pages = "".join(
        (ROOT / "docs" / name).read_text() for name in ("performance.md", "performance-gpu.md", "choosing.md")
    )
    told, reasons = set(re.findall(r"\d[\d.,]*\d|\d", pages)), {target.why for target in of_tables()}
    assert len(reasons) > 8
    for reason in reasons:
        assert set(re.findall(r"\d[\d.,]*\d|\d", reason)) <= told, reason


def test_every_target_is_of_something_that_make_bench_measures():
    measured = {one for name, sections in FULL.sections.items() for settings in sections for one in _of(name, settings)}
    tables = (targets.SPEEDS, targets.GIGABYTES)
    wanted = {(*series, place) for table in tables for series, places in table.items() for place in places}
    assert wanted <= measured


def _of(section, settings) -> list[tuple[str, str, int]]:
    """Direction, series and place of what a section against a baseline measures."""
    suffix = targets.WHERE.get(section, "")
    match settings:
        case AttentionSettings():
            titles, places = [way(name, settings.sizes).title for name in settings.names], settings.lengths
            direction = settings.direction
        case TrainingSettings():
            direction, titles, places = f"training step of {settings.preset}", settings.models, settings.contexts
        case DecodingSettings():
            direction, titles, places = f"decoding with {settings.preset}", settings.models, settings.positions
        case _:
            return []
    return [(direction + suffix, title, place) for title in titles for place in places]


def test_what_issues_want_is_wanted():
    speeds = {(*series, place): one for series, places in targets.SPEEDS.items() for place, one in places.items()}
    assert speeds["training step of mini", "random", 16_384].at_least == 2.9
    assert speeds["forward, 4 heads", "hyper", 16_384].at_least == 4
    assert speeds["forward, 4 heads", "llops", 16_384].at_least == 6
    assert speeds["forward, 1 head", "hyper", 131_072].at_least == 20
    assert speeds["forward in bfloat16", "learned sketch", 16_384].at_least == 6
    assert {targets.GIGABYTES["forward, 4 heads", name][16_384].at_most for name in ("performer", "polarity")} == {0.15}
    assert targets.HEAVY.at_most == 1.6
    assert (targets.FLOOR_PERCENT.at_least, targets.ONNX_RUNTIME.at_least) == (70, 2)
    assert (targets.BREAK_EVEN.at_most, targets.BFLOAT16_STEP.at_least) == (1_500, 1.6)


def test_tiny_sizes_are_of_the_same_sections():
    assert list(QUICK.sections) == list(FULL.sections)
    assert set(FULL.rounds) <= set(FULL.sections)


def test_break_even_lies_between_two_lengths_and_is_missed_where_there_is_none():
    times = [{"direction": "forward", "series": "sketch", "length": n, "ratio": n / 1_448} for n in (1_024, 2_048)]
    found = bfloat16_products._break_even(times)
    assert found.value == pytest.approx(1_448)
    assert found.reached is True
    slow = bfloat16_products._break_even([{**one, "ratio": 0.5} for one in times])
    assert (slow.value, slow.reached) == (math.inf, False)
    assert slow.lines[1].strip() == f"why: {targets.BREAK_EVEN.why}"
