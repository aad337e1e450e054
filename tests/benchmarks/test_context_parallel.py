"""The benchmark of one sequence over several processes, with tiny sizes."""

import json
from typing import Any

import pytest

from benchmarks import context_parallel
from polysketch.distributed import ContextGroup


def test_a_step_in_tiles_is_the_step_of_whole_rows():
    whole, tiles = (context_parallel.Case("", 64, 1, tiles, "tiny") for tiles in (0, 2))
    one, other = context_parallel.step(whole, None), context_parallel.step(tiles, ContextGroup(tiles=2))
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)
    assert one["peak_bytes"] > 0


def measured(**changes: Any) -> list[dict[str, Any]]:
    """Cases of which one process of the last two cases is changed."""
    arguments = context_parallel._parse([])
    figures = {"loss": 5.0, "gradient_norm": 1.0, "peak_bytes": 100}
    found = [
        {"name": case.name, "processes": [dict(figures) for _ in range(case.ranks)]}
        for case in context_parallel.cases(arguments)
    ]
    for case in found[2::2]:
        case["processes"][-1].update(changes)
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True]),
        ({"gradient_norm": 1.000001}, [True, False, True]),
        ({"loss": 5.001}, [False, False, True]),
        ({"peak_bytes": 111}, [True, True, False]),
    ],
)
def test_one_process_that_differs_is_found(changes: dict[str, Any], expected: list[bool]):
    assert list(context_parallel.findings(measured(**changes)).values()) == expected


@pytest.mark.full
def test_all_cases_are_written(tmp_path):
    out = tmp_path / "context.json"
    sizes = ["--ranks", "2", "--tiles", "2", "--length", "256", "--same", "128"]
    assert context_parallel.main([*sizes, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [len(case["processes"]) for case in report["cases"]] == [1, 1, 2, 1, 2]
    assert all(report["findings"].values())


def test_a_record_of_other_cases_is_not_gone_on_with(tmp_path):
    path, wanted = tmp_path / "context.json", context_parallel.cases(context_parallel._parse([]))
    assert context_parallel._measured_before(path, wanted) == []
    path.write_text(json.dumps({"cases": [{**context_parallel.asdict(wanted[0]), "processes": []}]}))
    assert len(context_parallel._measured_before(path, wanted)) == 1
    with pytest.raises(SystemExit, match="other cases"):
        context_parallel._measured_before(path, context_parallel.cases(context_parallel._parse(["--same", "64"])))
