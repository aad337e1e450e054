"""The record of mechanisms with their maps has medians over its rounds, and how many times as fast they are."""

import json

from benchmarks import mapped_features


def test_medians_stand_beside_the_floor_and_ratios_are_those_of_each_round(tmp_path, monkeypatch):
    seconds = iter([1.0, 10.0, 3.0, 60.0, 2.0, 40.0])
    rate = mapped_features.operations("performer", backward=False)
    monkeypatch.setattr(
        mapped_features,
        "once",
        lambda *_: [
            {"mechanism": "performer", "rate": rate, "forward": next(seconds), "with_backward": 7.0},
            {"mechanism": "linear", "rate": rate, "forward": 1.0, "with_backward": 2.0},
        ],
    )
    out = tmp_path / "record.json"
    mapped_features.main(["--before", str(tmp_path), "--repeats", "3", "--out", str(out)])
    rows = {(row["mechanism"], row["source"]): row for row in json.loads(out.read_text())["medians"]}
    after, before = rows["performer", "after"], rows["performer", "before"]
    assert (after["forward"], before["forward"]) == (2000.0, 40000.0)
    assert (after["forward_share"], before["forward_share"]) == (50, 2)
    assert (after["forward_times_as_fast"], after["with_backward_times_as_fast"]) == (20.0, 1.0)
    assert "forward_share" not in rows["linear", "after"]


def test_the_floor_of_llops_has_four_products_a_feature_where_performer_has_one():
    sums = 4 * 4 * 16_384 * 256 * 65
    performer, llops = (mapped_features.operations(name, backward=False) - sums for name in ("performer", "llops"))
    assert llops == 4 * performer == 16 * 2 * 4 * 16_384 * 64 * 256 / 2
