"""The study of forms at its smallest: what it leaves behind, and what it calls a repeat."""

import json
import random

import numpy as np
import pytest
from experiments.learning import forms_compared
from experiments.learning.forms import FORMS, chosen
from experiments.learning.repeats import Repeat, repeats
from experiments.study.command import run_command

from polysketch.data import prepare

ONLY = ("softmax", "codes", "mixture")


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Names in random order, prepared as bytes."""
    folder, words = tmp_path_factory.mktemp("forms"), random.Random(0)
    for split in ("train", "validation", "test"):
        (folder / "text" / split).mkdir(parents=True)
        text = " ".join(words.choice(["self", "value", "key", "query"]) for _ in range(400))
        (folder / "text" / split / "code.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text"], "bytes", folder / "prepared", progress=False)
    return folder / "prepared"


def compare(out, data, *more) -> int:
    given = ["--size", "smoke", "--data", data, "--out", out, "--only", *ONLY, *more]
    return run_command("forms_compared", forms_compared.run, [str(one) for one in given])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_folder):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("finished")
    assert compare(out, data_folder) == 0
    return out


def test_every_form_leaves_a_record_a_row_and_a_line(finished):
    results = finished / "smoke" / "results"
    records = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert records.keys() == {f"{name}-seed0" for name in ONLY}
    assert all(record["loss"] > 0 and record["counts"]["far"] > 0 for record in records.values())
    assert records["codes-seed0"]["loss_without"] != records["codes-seed0"]["loss"]
    assert len(records["codes-seed0"]["shares"]) == 4
    assert "loss_without" not in records["softmax-seed0"]
    assert len((results / "table.md").read_text().splitlines()) == 2 + len(ONLY)
    assert (results / "validation.png").stat().st_size > 1_000


def test_what_is_finished_is_kept_and_other_settings_are_refused(finished, data_folder, monkeypatch, capsys):
    monkeypatch.setattr(forms_compared, "train", None)
    assert compare(finished, data_folder) == 0
    assert compare(finished, data_folder, "--window", "4") == 1
    assert "window was 8 and is now 4" in capsys.readouterr().err


def test_a_run_that_is_stopped_is_no_record_and_goes_on(tmp_path, data_folder, monkeypatch):
    pytest.importorskip("matplotlib")
    train = forms_compared.train

    def stopped(config):
        found = train(config)
        return type(found)(**{**vars(found), "stopped_by": "signal"})

    monkeypatch.setattr(forms_compared, "train", stopped)
    assert compare(tmp_path, data_folder) == 130
    assert not list((tmp_path / "smoke").glob("*.json"))
    monkeypatch.setattr(forms_compared, "train", train)
    assert compare(tmp_path, data_folder) == 0


def test_a_pair_is_near_far_or_new_by_where_it_occurred_last():
    window = np.array([[1, 2, 3, 1, 2, 9, 9, 9, 2, 3, 1, 2]])
    expected = [
        *(Repeat.NEW, Repeat.NEW, Repeat.NEW),  # 12, 23, 31
        Repeat.NEAR,  # 12, three tokens back
        *(Repeat.NEW, Repeat.NEW, Repeat.NEAR, Repeat.NEW),  # 29, 99, 99 again, 92
        *(Repeat.FAR, Repeat.FAR, Repeat.FAR),  # 23, 31, 12: seven tokens back
    ]
    assert repeats(window, 4).tolist() == [[int(one) for one in expected]]


def test_the_window_is_filled_in_wherever_a_form_leaves_it_open():
    assert FORMS["window"].attention_options(16) == {"window": 16}
    assert FORMS["based"].attention_options(16) == {"sliding-window": {"window": 16}}
    assert FORMS["paper"].attention_options(16) == {"local_chunk": 16}
    with pytest.raises(ValueError, match="no form best; the forms are softmax"):
        chosen(["best"])
