"""The benchmark of serving runs, and its record has what the page quotes."""

import json

from benchmarks import serving


def test_it_writes_its_figures(tmp_path):
    out = tmp_path / "serving.json"
    assert serving.main(["--at-once", "1", "2", "--steps", "2", "--rounds", "1", "--out", str(out)]) == 0
    (measured,) = json.loads(out.read_text())["measurements"]
    assert measured["preset"] == "tiny"
    assert list(measured["speed"]) == ["1", "2"]
    assert all(value > 0 for value in measured["speed"].values())
    assert [each["chunk"] for each in measured["steps_beside"]] == [128, 512]
    assert all(each["step"] > 0 and each["ratio"] > 0 for each in measured["steps_beside"])
    assert measured["state_bytes"] == 3_763_304
