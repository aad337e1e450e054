"""The record of attention over plain features has medians over its rounds, beside a floor counted from shapes."""

import json
from dataclasses import replace

import pytest

from benchmarks import plain_features, targets


def test_medians_of_both_checkouts_stand_beside_the_floor_of_the_measured_rate(tmp_path, monkeypatch, capsys):
    seconds = iter([1.0, 10.0, 3.0, 50.0, 2.0, 20.0])
    operations = 4 * plain_features.HEADS * 4_096 * 8 * (plain_features.VALUE_WIDTH + 1)
    monkeypatch.setattr(
        plain_features,
        "once",
        lambda *_: [
            {"features": 8, "rate": operations, "forward": next(seconds), "with_backward": 7.0, "onnx_runtime": 6.0}
        ],
    )
    out = tmp_path / "record.json"
    plain_features.main(["--before", str(tmp_path), "--features", "8", "--repeats", "3", "--out", str(out)])
    after, before = json.loads(out.read_text())["medians"]
    assert (after["forward"], before["forward"]) == (2000.0, 20000.0)
    assert (after["forward_floor"], after["forward_share"], before["forward_share"]) == (1000.0, 50, 5)
    assert (after["with_backward_floor"], after["with_backward_share"]) == (3500.0, 50)
    figures = [(one["at_least"], one["reached"]) for one in json.loads(out.read_text())["figures"]]
    assert figures == [(70, False), (70, False), (2, True)]
    assert "8 features, with backward: of the floor" in (printed := capsys.readouterr().out)
    assert printed.count("MISSED") == 2
    assert printed.count(f"why: {targets.FLOOR_PERCENT.why}") == 2
    assert (after["onnx_runtime"], after["times_as_fast"]) == (6000.0, 3.0)


@pytest.mark.full
def test_a_round_measures_the_package_of_its_checkout(monkeypatch):
    for name, size in (("HEADS", 1), ("VALUE_WIDTH", 3)):
        monkeypatch.setattr(plain_features, name, size)
    settings = plain_features.PlainFeatureSettings(features=(5, 6), tokens=40, calls=1)
    narrow, wide = plain_features.once(plain_features.HERE, settings)
    assert (narrow["features"], wide["features"]) == (5, 6)
    assert all(narrow[name] > 0 for name in ("rate", "forward", "with_backward", "onnx_runtime"))
    with pytest.raises(Exception, match="non-zero exit status"):
        plain_features.once(plain_features.HERE, replace(settings, features=(-1,)))
