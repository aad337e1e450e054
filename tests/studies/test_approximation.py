"""The studies of approximation: what a run leaves, of Gaussian vectors and of a trained model's, and its verdict."""

import json
import math
from pathlib import Path

import pytest

from attention.covering import first_always
from polysketch.cli import main
from polysketch.studies import pieces
from polysketch.studies.approximation import study as approximation
from polysketch.studies.approximation.contenders import APPROXIMATIONS, CONTENDERS
from polysketch.studies.catalogue import study_called
from polysketch.studies.study import Verdict


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where studies keep their things."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(name: str, *more: str) -> int:
    return main(["study", name, "--threads", "1", *more])


def records(name: str) -> dict[str, dict]:
    """By row, in the one folder of results."""
    (results,) = Path("runs/studies").glob(f"{name}-smoke*/results")
    return {path.name.partition("-seed")[0]: json.loads(path.read_text()) for path in results.glob("*-seed0.json")}


def test_every_map_and_mechanism_is_a_row():
    rows = {*study_called("kernels").rows, *study_called("sketches").rows}
    assert rows == CONTENDERS.keys()
    assert set(study_called("outputs").rows) == APPROXIMATIONS.keys()


@pytest.mark.usefixtures("pixels")
@pytest.mark.parametrize("name", first_always(["outputs", "sketches", "kernels"]))
def test_a_run_leaves_a_record_with_finite_errors_a_table_a_plot_and_one_line(name: str, capsys):
    assert study(name) == 0
    told = capsys.readouterr().out
    settings = study_called(name).sizes["smoke"]
    found = records(name)
    assert found.keys() == set(study_called(name).rows)
    for one in found.values():
        assert {"commit", "torch"} <= one["provenance"].keys()
        assert one["settings"]["inputs"] == "Gaussian queries and keys of 6, layer-normed"
        assert len(one["measurements"]) == len(settings.features) * len(settings.lengths) * len(one_of(settings))
        for error in (one for each in one["measurements"] for one in errors_of(each)):
            assert math.isfinite(error)
    assert f"{study_called(name).claim} Paper: " in told
    (plot,) = Path("runs/studies").glob(f"{name}-smoke*/results/errors.png")
    assert plot.stat().st_size > 1_000


def one_of(settings) -> tuple:
    return getattr(settings, "degrees", (None,))


def errors_of(one: dict) -> list[float]:
    if one["kind"] == "mechanism":
        return [one["frobenius"], one["operator_norm_error"], one["alpha"]]
    assert one["held_out"]["ratio"] is None or one["held_out"]["ratio"] >= 1 or one["held_out"]["optimum"] < 1e-9
    return [one[part][name] for part in ("fitted", "held_out") for name in ("frobenius", "sketch_error", "optimum")]


def test_a_seed_gives_the_figures():
    few = ("--only", "random", "--set", "degrees=[2]")
    assert study("kernels", *few, "--seeds", "0", "1") == 0
    (results,) = Path("runs/studies").glob("kernels-smoke*/results")
    first, other = (json.loads((results / f"random-seed{seed}.json").read_text())["measurements"] for seed in (0, 1))
    (results / "random-seed0.json").unlink()
    for piece in Path("runs/studies").glob("kernels-smoke*/random-seed0*/*.json"):
        piece.unlink()
    assert study("kernels", *few) == 0
    again = json.loads((results / "random-seed0.json").read_text())["measurements"]
    assert [one["held_out"] for one in again] == [one["held_out"] for one in first] != [x["held_out"] for x in other]


def test_a_mechanism_whose_window_covers_the_text_is_exact_and_none_is_beyond_it():
    assert study("outputs", "--only", "sliding-window", "--set", "features=[16, 64]") == 0
    for one in records("outputs")["sliding-window"]["measurements"]:
        assert (one["frobenius"] < 1e-6) == (one["features"] >= one["length"])
        assert one["length"] < 32 or one["exact_beyond"]["32"] > 0.01
        assert one["length"] < 32 or (one["beyond"]["32"] == 0) == (one["features"] == 16)


def test_a_run_that_was_killed_keeps_its_degrees(monkeypatch, capsys):
    real, made = approximation.measure_map, []

    def killed(name, inputs, degree, *more):
        made.append(degree)
        if made == [2, 3]:
            raise KeyboardInterrupt
        return real(name, inputs, degree, *more)

    monkeypatch.setattr(approximation, "measure_map", killed)
    assert study("kernels", "--only", "random") == 130
    assert study("kernels", "--only", "random") == 0
    assert made == [2, 3, 3]


def test_a_piece_of_other_settings_is_not_taken(tmp_path):
    make = {"one": lambda: [{"value": 1}]}
    assert pieces.in_pieces(tmp_path, {"steps": 2}, make) == [{"value": 1}]
    assert pieces.in_pieces(tmp_path, {"steps": 2}, {"one": list}) == [{"value": 1}]
    with pytest.raises(ValueError, match="steps was 2 and is now 3"):
        pieces.in_pieces(tmp_path, {"steps": 3}, make)


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run of two steps on a few kilobytes of text."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text("\n\n".join(f"On day {day} the sun rose {day % 7} times over the hills." for day in range(400)))
    shares = ["--validation-share", "0.3", "--test-share", "0.1"]
    assert main(["prepare", str(text), "--tokenizer", "bytes", "--cut-text", "500", "--out", str(data), *shares]) == 0
    sizes = ["--preset", "tiny", "--layers", "3", "--context", "64", "--steps", "2", "--batch-size", "2"]
    flags = ["--attention", "softmax", "--eval-every", "0", "--device", "cpu", "--out", str(run)]
    assert main(["train", "--data", str(data), *sizes, *flags]) == 0
    return run


@pytest.mark.full
def test_the_queries_and_keys_of_a_trained_model_are_taken_layer_by_layer(trained, capsys):
    few = ("--only", "random", "--set", f'run="{trained}"')
    assert study("kernels", *few, "heads=[0, 1]") == 0
    found = records("kernels")["random"]
    names = [f"layer {layer} head {head}" for layer in (0, 1, 2) for head in (0, 1)]
    assert list(dict.fromkeys(one["inputs"] for one in found["measurements"])) == names
    assert "trained for 2 steps with softmax attention" in found["settings"]["inputs"]
    assert study("kernels", *few, "layers=[5]", "--results", "a", "--out", "b") == 1
    assert "expected layers from 0 to 2, found 5" in capsys.readouterr().err
    assert study("kernels", *few, "fit_tokens=1000000", "--results", "a", "--out", "b") == 1
    assert "tokens in that part of the split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "nope"], "--only: expected rows of random, network, llops"),
        (["--set", "steps=0"], "expected steps of at least 1"),
        (["--set", 'run="absent"'], "absent"),
        (["--only", "random", "--set", "fit_tokens=30"], "expected at least 50 tokens, found 30"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(more, message: str, capsys):
    assert study("kernels", *more) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def measured(name: str, error: float, degree: int = 2, features: int = 8) -> dict:
    held_out = {"frobenius": error, "sketch_error": error}
    return {"map": name, "degree": degree, "features": features, "length": 50, "width": features, "held_out": held_out}


def test_the_order_of_maps_is_that_of_the_most_features_at_every_degree():
    judge = approximation.in_order("a", "b")
    found = [measured("a", 0.1, features=4), measured("a", 0.9), measured("b", 0.5), measured("b", 0.2, degree=3)]
    assert judge(found).holds is None
    assert judge([*found, measured("a", 0.3, 3)]) == Verdict("p = 2: a 0.90, b 0.50; p = 3: a 0.30, b 0.20", True)
    assert judge([*found, measured("a", 0.1, 3)]).holds is False


def test_an_error_falls_by_the_power_that_it_has():
    judge = approximation.falling(("a",), lambda one: one["held_out"]["sketch_error"], "width", -0.45)
    root = [measured("a", size**-0.5, features=size) for size in (4, 16, 64)]
    assert judge(root) == Verdict("powers a at p = 2 -0.50", True)
    assert judge([*root, *(measured("a", size**-0.25, 3, size) for size in (4, 16))]).holds is False
    assert judge(root[:1]).holds is None
    assert judge([measured("b", 1.0)]) == Verdict("no such row", None)
