"""The study of forms at its smallest: what it leaves behind, and what it calls a repeat."""

import dataclasses
import gzip
import json
from itertools import pairwise

import numpy as np
import pytest

from polysketch.cli import main
from polysketch.studies import forms
from polysketch.studies.forms import FORMS, FORMS_STUDY, TEXTS
from polysketch.studies.held_out import by_distance, by_position
from polysketch.studies.repeats import Repeat, distances, repeats

ONLY = ("softmax", "codes")


@pytest.mark.full
@pytest.mark.usefixtures("pixels")
def test_every_form_leaves_a_record_a_row_and_a_line_and_is_measured_once(folder, monkeypatch):
    command = ["study", "forms", "--threads", "1", "--only", *ONLY]
    assert main(command) == 0
    monkeypatch.setattr(forms, "trained", None)
    assert main(command) == 0
    results = folder / "runs/studies/forms-smoke/results"
    found = {name: json.loads((results / f"{name}-seed0.json").read_text()) for name in ONLY}
    assert found["codes"]["loss_without"] != found["codes"]["loss"]
    assert len(found["codes"]["shares"]) == 4
    assert "loss_without" not in found["softmax"]
    for record in found.values():
        assert record["counts"]["far"] > 0
        assert record["position_edges"] == list(range(0, 49, 3))
        assert np.mean(record["loss_by_position"]) == pytest.approx(record["loss"], rel=1e-6)
        assert list(record["lengths"]) == ["48", "192"]
        assert list(record["needle"]) == ["none", "0", "0.5"]
        assert record["distances"] == [1, 2, 4, 8, 16, 32, 64]
        assert record["loss_by_distance"][-1] > 0
    assert len((results / "table.md").read_text().splitlines()) == 2 + len(ONLY) + 2
    names = ("validation", "loss-by-position", "loss-by-length", "loss-by-distance", "gain-by-depth")
    assert all((results / f"{name}.png").stat().st_size > 1_000 for name in names)


def test_books_are_read_in_the_place_of_source_code_and_records_of_code_are_as_before(books, folder, capsys):
    command = ["study", "forms", "--threads", "1", "--only", "softmax", "--set"]
    assert main([*command, 'text="novels"']) == 1
    assert 'expected one of code, books, found "novels"' in capsys.readouterr().err
    text = TEXTS["books"]("bytes", folder / "place", None)
    assert text.folder.parent == folder / "place"
    read = bytes(text.split("test").tokens[:64].tolist()).decode()
    assert gzip.decompress((books / "test.txt.gz").read_bytes()).decode().startswith(read)
    smoke = FORMS_STUDY.sizes["smoke"]
    assert "text" not in FORMS_STUDY.depends_on("softmax", 0, smoke)
    assert FORMS_STUDY.depends_on("softmax", 0, dataclasses.replace(smoke, text="books"))["text"] == "books"


def test_a_schedule_is_told_where_it_is_not_the_linear_one() -> None:
    smoke = FORMS_STUDY.sizes["smoke"]
    assert "schedule" not in FORMS_STUDY.depends_on("softmax", 0, smoke)
    assert FORMS_STUDY.depends_on("softmax", 0, dataclasses.replace(smoke, schedule="wsd"))["schedule"] == "wsd"


def test_the_losses_of_ranges_of_positions_are_their_means():
    losses = np.arange(3)[:, None] + np.arange(40.0) ** 2
    found = by_position(losses)
    edges = found["position_edges"]
    assert len(edges) == 17
    assert (edges[0], edges[-1], set(np.diff(edges))) == (0, 40, {2, 3})
    means = [losses[:, first:end].mean() for first, end in pairwise(edges)]
    assert found["loss_by_position"] == pytest.approx(means)
    assert by_position(losses[:, :5]) == {"position_edges": [0, 1, 2, 3, 4, 5], "loss_by_position": [1, 2, 5, 10, 17]}


def test_a_pair_is_near_far_or_new_by_where_it_occurred_last():
    window = np.array([[1, 2, 3, 1, 2, 9, 9, 9, 2, 3, 1, 2]])
    expected = [
        *(Repeat.NEW, Repeat.NEW, Repeat.NEW),  # 12, 23, 31
        Repeat.NEAR,  # 12, three tokens back
        *(Repeat.NEW, Repeat.NEW, Repeat.NEAR, Repeat.NEW),  # 29, 99, 99 again, 92
        *(Repeat.FAR, Repeat.FAR, Repeat.FAR),  # 23, 31, 12: seven tokens back
    ]
    assert repeats(window, 4).tolist() == [[int(one) for one in expected]]
    assert distances(window).tolist() == [[0, 0, 0, 3, 0, 0, 1, 0, 7, 7, 7]]


def test_losses_by_distance_are_of_pairs_up_to_it_and_beyond_the_one_before():
    window = np.array([[1, 2, 3, 1, 2, 9, 9, 9, 2, 3, 1, 2]])
    losses = 2.0 ** np.arange(11)[None]
    expected = {"distances": [1, 2, 4, 8], "loss_by_distance": [2**6, None, 2**3, (2**8 + 2**9 + 2**10) / 3]}
    assert by_distance(losses, window) == expected
    assert by_distance(losses[:, :2], window[:, :3]) == {"distances": [1], "loss_by_distance": [None]}


def test_the_window_is_filled_in_wherever_a_form_leaves_it_open():
    assert FORMS["window"].attention_options(16) == {"window": 16}
    assert FORMS["based"].attention_options(16) == {"sliding-window": {"window": 16}}
    assert FORMS["paper"].attention_options(16) == {"local_chunk": 16}
    last = {"sliding-window": {"window": 16}, "polysketch": {"window": 16, "sketch_size": 32}}
    assert FORMS["polysketch-every-2"].attention_options(16) == last


def test_a_form_of_every_few_layers_has_windows_before_it():
    assert FORMS["polysketch-every-3"].pattern == ("sliding-window", "sliding-window", "polysketch")
    assert FORMS["softmax"].pattern == "softmax"
    assert FORMS["based"].pattern == ("based", "sliding-window")


def test_a_form_is_named_by_its_layers():
    named = {name: int(name.split("-every-")[1].split("-")[0]) for name in FORMS if "-every-" in name}
    assert named == {name: form.every for name, form in FORMS.items() if form.every > 1}


@pytest.mark.parametrize(("softmax", "ours", "holds"), [(2.44, 2.449, True), (2.44, 2.451, False), (2.44, None, None)])
def test_the_claim_is_judged_by_means_over_seeds(softmax, ours, holds):
    records = [{"row": "softmax", "loss": softmax + change} for change in (-0.1, 0.1)]
    records += [] if ours is None else [{"row": "polysketch-every-2", "loss": ours}]
    verdict = FORMS_STUDY.judge(records)
    assert verdict.holds is holds
    assert verdict.ours.startswith("softmax 2.440 nats")
