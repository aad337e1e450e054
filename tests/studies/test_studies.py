"""Studies: every table of the papers is listed, a run leaves one record, and what is there is kept."""

import contextlib
import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from polysketch.cli import main
from polysketch.data.tokenization import BytesTokenizer
from polysketch.models import ModelConfig, TransformerLM, preset
from polysketch.storage import disk
from polysketch.studies import study as study_module
from polysketch.studies import task_study
from polysketch.studies.catalogue import ENTRIES, STUDIES, study_called
from polysketch.studies.listing import listed
from polysketch.studies.task_study import Shorter, TaskSettings, state_bytes
from polysketch.tasks import open_task

OF_TASKS = [
    name for name, place in STUDIES.items() if place.startswith(("tasks.", "mad.", "arena.", "two_runs.", "pictures."))
]


# One study each of all that ask alike stands for the others.
FIRST = {study_called(name).asks: name for name in reversed(OF_TASKS)}
SHORT_AND_LONG = [pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST.values())) for name in OF_TASKS]


@pytest.mark.usefixtures("pixels")
@pytest.mark.parametrize("name", SHORT_AND_LONG)
def test_a_study_of_seconds_leaves_records_table_plot_and_one_line(name: str, folder: Path, capsys, arena):
    both_sides = study_called(name).asks not in ("next", "recovered")
    other = "focused" if name == "image-classification" else "linear" if both_sides else "polysketch"
    rows = ["softmax", other] if name in ("reversal", "selective-copying") else [other]
    assert main(["study", name, "--only", *rows, "--threads", "1"]) == 0
    results = folder / f"runs/studies/{name}-smoke/results"
    study = study_called(name)
    for row in rows:
        record = json.loads((results / f"{row}-seed0.json").read_text())
        assert record["settings"]["attention"] == row
        assert {"commit", "torch"} <= record["provenance"].keys()
        assert record["curve"][-1][0] == study.sizes["smoke"].steps
        assert record["test"]["rows"] == study.sizes["smoke"].test_rows
        assert record["lengths"].keys() == {str(length) for length in study.sizes["smoke"].lengths}
    assert (results / "accuracy.png").stat().st_size > 1000
    assert (results / "loss.png").exists() == (study.by == "loss")
    table = (results / "table.md").read_text()
    assert table in capsys.readouterr().out + "\n"
    assert f"{study.claim} Paper: {study.paper}. Here: " in table


def test_a_row_that_was_pretrained_takes_its_encoder_over(folder: Path):
    rows = ["linear", "linear+pretrained=true"]
    assert main(["study", "listops-pretrained", "--only", *rows, "--threads", "1"]) == 0
    runs = folder / "runs/studies/listops-pretrained-smoke"
    configs = [json.loads(path.read_text())["training"] for path in sorted(runs.glob("*=true-seed0*/*/config.json"))]
    assert [one["objective"] for one in configs] == ["masked", "auto"]
    assert configs[1]["init_from"].endswith("hidden")
    summary = json.loads((runs / "results/summary.json").read_text())
    assert summary["ours"].startswith(("linear +", "linear -"))
    record = json.loads((runs / f"results/{rows[1]}-seed0.json").read_text())
    assert [step for step, *_ in record["curve"]] == [2]


def test_a_row_that_begins_exactly_makes_its_steps_in_two_runs(folder: Path, capsys):
    row = "polysketch-paper+exact=0.5"
    assert main(["study", "exact-first", "--only", row, "--threads", "1"]) == 0
    runs = folder / "runs/studies/exact-first-smoke"
    configs = [json.loads(path.read_text())["training"] for path in sorted(runs.glob("*-seed0*/*/config.json"))]
    assert [(one["attention"], one["steps"]) for one in configs] == [("polynomial", 1), ("polysketch-paper", 1)]
    assert configs[1]["init_new"] == ["feature_map"]
    record = json.loads((runs / f"results/{row}-seed0.json").read_text())
    assert [step for step, *_ in record["curve"]] == [1, 2]
    capsys.readouterr()
    assert main(["study", "exact-first", "--only", "softmax+exact=0.5"]) == 1
    assert "expected polysketch-paper beside a share exact" in capsys.readouterr().err


def test_a_task_may_be_learned_on_shorter_rows_first(folder: Path, monkeypatch):
    study = study_called("selective-copying")
    shorter = (Shorter(24, 3, 2, 1e-2), Shorter(28, 1, 2, 1e-3))
    monkeypatch.setitem(study.sizes, "smoke", dataclasses.replace(study.sizes["smoke"], shorter=shorter))
    assert main(["study", "selective-copying", "--only", "polysketch", "--threads", "1"]) == 0
    runs = folder / "runs/studies/selective-copying-smoke"
    (row,) = runs.glob("polysketch-seed0*")
    found = [json.loads((row / run / "config.json").read_text()) for run in ("run-24", "run-28", "run")]
    configs = [one["training"] for one in found]
    assert [(one["steps"], one["learning_rate"]) for one in configs[:2]] == [(3, 1e-2), (1, 1e-3)]
    assert configs[0]["init_from"] is None
    assert [Path(one["init_from"]).name for one in configs[1:]] == ["run-24", "run-28"]
    assert [open_task(one["data"]).options()["length"] for one in configs] == [24, 28, 32]
    record = json.loads((runs / "results/polysketch-seed0.json").read_text())
    assert [step for step, *_ in record["curve"]] == [3, 4, 6]
    assert record["settings"]["shorter"][0]["length"] == 24


def test_shorter_rows_grow_and_stand_before_one_kind_of_run():
    twice = (Shorter(24, 3, 2, 1e-2), Shorter(24, 1, 2, 1e-3))
    with pytest.raises(ValueError, match=r"rows that grow from one to the next, found lengths \[24, 24\]"):
        TaskSettings(shorter=twice)
    with pytest.raises(ValueError, match=r"expected a list of \{length, steps, batch_size, learning_rate\}, found 3"):
        TaskSettings(shorter=3)
    study = study_called("exact-first")
    settings = dataclasses.replace(study.sizes["smoke"], shorter=twice[:1])
    with pytest.raises(ValueError, match="shorter: expected none in a study of two runs"):
        study.trainings("polysketch-paper", 0, settings, Path(), study.task_of(settings, 0))


def test_what_is_there_is_kept_and_other_settings_overwrite_nothing(folder: Path, capsys, monkeypatch):
    command = ["study", "reversal", "--only", "linear", "--threads", "1"]
    assert main(command) == 0
    record = folder / "runs/studies/reversal-smoke/results/linear-seed0.json"
    before = record.read_bytes()
    assert main([*command, "--seeds", "0", "1"]) == 0
    assert "there is a record" in capsys.readouterr().out
    assert record.read_bytes() == before
    with monkeypatch.context() as patch:
        sizes = study_called("reversal").sizes
        patch.setitem(sizes, "smoke", dataclasses.replace(sizes["smoke"], steps=3))
        assert main(command) == 1
    assert "other settings: steps was 2 and is now 3; give another --results" in capsys.readouterr().err
    assert record.read_bytes() == before
    assert main([*command, "--set", "steps=3", 'task={"length": 6}']) == 0  # asked for, it has a place of its own
    changed = folder / "runs/studies/reversal-smoke+steps=3+task=length6/results"
    assert json.loads((changed / "linear-seed0.json").read_text())["settings"]["task"] == {"length": 6}
    assert json.loads((changed / "summary.json").read_text())["size"] == "smoke+steps=3+task=length6"
    assert record.read_bytes() == before
    summary = json.loads((record.parent / "summary.json").read_text())
    assert (summary["runs"], summary["rows"], summary["study"], summary["size"]) == (2, 1, "reversal", "smoke")


def test_a_full_disk_leaves_the_earlier_table(folder: Path, capsys, monkeypatch):
    def full(path: Path, *_: object, **__: object) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    command = ["study", "reversal", "--only", "linear", "--threads", "1"]
    assert main(command) == 0
    table = folder / "runs/studies/reversal-smoke/results/table.md"
    before = table.read_bytes()
    monkeypatch.setattr(disk, "write", full)
    monkeypatch.setattr(Path, "write_text", full)
    assert main(command) == 1
    assert "no space left on the disk" in capsys.readouterr().err
    assert table.read_bytes() == before != b""


def test_a_row_may_have_options_of_its_mechanism_and_of_the_model(folder: Path, capsys):
    rows = [
        "polysketch-paper+prefix_gain=0.5",
        "polysketch-paper",
        "llops+rotary=False+num_features=8+attention_every=2",
    ]
    assert main(["study", "recall", "--only", *rows, "--threads", "1"]) == 0
    runs = folder / "runs/studies/recall-smoke"
    gain, plain, unrotated = (json.loads(next(runs.glob(f"{row}-seed0*/run/config.json")).read_text()) for row in rows)
    assert gain["model"]["sizes"]["attention_options"] == {"local_chunk": 4, "prefix_gain": 0.5}
    assert plain["model"]["sizes"]["attention_options"] == {"local_chunk": 4}
    assert [one["model"]["sizes"]["rotary"] for one in (gain, unrotated)] == [True, False]
    assert [one["model"]["sizes"]["attention_every"] for one in (gain, unrotated)] == [1, 2]
    assert unrotated["model"]["sizes"]["attention_options"] == {"num_features": 8}
    table = (runs / "results/table.md").read_text().splitlines()
    assert [line.split()[1] for line in table[2:5]] == ["polysketch-paper", *sorted((rows[0], rows[2]))]


def test_the_activations_of_the_thesis_are_rows_of_reversal():
    six = {"polynomial+degree=8", "squared-polynomial+coefficients=5", "softmax", "linear"}
    assert six | {"squared-polynomial+coefficients=3+learned=True"} <= set(study_called("reversal").rows)
    for row in study_called("reversal").rows:
        study_called("reversal").check_row(row)
    study_called("reversal").check_row("squared-polynomial+coefficients=(0.5,2,-3,4)")


def test_a_run_that_was_stopped_goes_on(folder: Path, monkeypatch, capsys):
    """And its task is that of the first try."""
    from polysketch.studies import task_study

    real, calls = task_study.train, []

    def stopped(config):
        calls.append(config)
        result = real(config)
        return result if len(calls) > 1 else type(result)(result.folder, result.step, "signal")

    monkeypatch.setattr(task_study, "train", stopped)
    command = ["study", "reversal", "--only", "linear", "--threads", "1"]
    assert main(command) == 130
    assert not (folder / "runs/studies/reversal-smoke/results/linear-seed0.json").exists()
    assert main(command) == 0
    assert calls[0].data == calls[1].data
    assert open_task(calls[0].data).longest == 8


def test_a_run_that_was_stopped_is_not_taken_for_one_with_other_settings(folder: Path, monkeypatch):
    from polysketch.studies import task_study

    real, tasks = task_study.train, []

    def stopped(config):
        tasks.append(open_task(config.data).longest)
        result = real(config)
        return result if len(tasks) > 1 else type(result)(result.folder, result.step, "signal")

    monkeypatch.setattr(task_study, "train", stopped)
    command = ["study", "reversal", "--only", "linear", "--threads", "1"]
    assert main(command) == 130
    sizes = study_called("reversal").sizes
    monkeypatch.setitem(sizes, "smoke", dataclasses.replace(sizes["smoke"], task={"length": 6}))
    assert main(command) == 0
    assert tasks == [8, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reversal", "--only", "linear+feature"], "expected a row name+option=value, found 'linear+feature'"),
        (["reversal", "--only", "linear+nope=1"], "--only: attention mechanism 'linear' has no option 'nope'"),
        (["nope"], "expected a study of selective-copying"),
        (["reversal", "--size", "huge"], "--size: expected one of smoke, cpu, narrow, paper"),
        (["reversal", "--only", "polysketch"], "--only: expected rows of softmax"),  # it is causal only
        (["reversal", "--set", "epochs=3"], "with one of task, preset, layers"),
        (["reversal", "--set", "steps=many"], "a value in JSON"),
        (["reversal", "--set", 'steps="4"'], "expected int, found"),
        (["reversal", "--set", "lengths=5"], "expected tuple[int, ...], found 5"),
        (["reversal", "--set", "training=3"], "expected dict[str, typing.Any], found 3"),
        (["reversal", "--set", "test_rows=0"], "test_rows must be at least 1"),
        (["forms", "--set", "stretches=0"], "stretches must be at least 1"),
        (["books", "--set", "contexts=[]"], "contexts: expected at least one, found none"),
        (["books", "--set", "contexts=[0]"], "contexts: 0 must be at least 1"),
        (["carried-state", "--set", "edges=[]"], "edges: expected two positions or more"),
        (["carried-state", "--set", "edges=[0,8,8]"], "edges: expected two positions or more, from 0 on and rising"),
        (["carried-state", "--set", "timed_steps=3"], "timed_steps: expected at least 4, found 3"),
        ([], "the name of a study, or --list"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, message: str, folder: Path, capsys):
    assert main(["study", *arguments]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("state_at=[8]", "state_at: expected none where nothing is decoded"), ("lengths=[0]", "length")],
)
def test_what_could_not_be_measured_is_refused_before_training(setting, message, folder: Path, capsys, monkeypatch):
    monkeypatch.setattr(task_study, "train", None)
    assert main(["study", "reversal", "--only", "linear", "--set", setting]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not list(folder.glob("runs/studies/*/results/*.json"))


def test_tables_are_written_by_one_process_at_a_time(folder: Path, capsys, monkeypatch):
    """Each of those that share a study out shows all records."""
    command = ["study", "reversal", "--only", "linear", "--threads", "1"]
    assert main(command) == 0
    held, places = [], []

    @contextlib.contextmanager
    def held_alone(place):
        places.append(place)
        held.append(True)
        yield
        held.pop()

    show = study_module.show
    monkeypatch.setattr(study_module, "one_at_a_time", held_alone)
    monkeypatch.setattr(study_module, "show", lambda *given: (held[0], show(*given))[1])
    assert main(command) == 0
    assert [place.name for place in places] == ["reversal-smoke"]


FROM_FILES = {
    "reviews": "expected imdb_train_2000.jsonl.gz, imdb_test_1000.jsonl.gz",
    "retrieval": "expected aan/new_aan_pairs.train.tsv, aan/new_aan_pairs.eval.tsv, aan/new_aan_pairs.test.tsv",
    "pathfinder": "expected pathfinder32/curv_contour_length_14",
    "image": "expected data_batch_1.bin, data_batch_2.bin",
}


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_study_without_its_files_says_in_a_line_which_are_missing(name: str, folder: Path, monkeypatch, capsys):
    command = ["study", name, "--only", "linear", "--threads", "1"]
    monkeypatch.delenv("POLYSKETCH_DATA", raising=False)
    assert main(command) == 1
    assert "POLYSKETCH_DATA" in capsys.readouterr().err
    monkeypatch.setenv("POLYSKETCH_DATA", str(folder))
    assert main(command) == 1
    told = capsys.readouterr().err
    assert FROM_FILES[name] in told
    assert told.count("\n") == 1
    assert not list(folder.glob("runs/studies/*/results/*.json"))


def test_all_reviews_are_read_where_their_folder_is_named(folder: Path, monkeypatch):
    for split in ("train", "test"):
        for name in ("neg", "pos"):
            (folder / "lra/aclImdb" / split / name).mkdir(parents=True)
            for number in range(10):
                (folder / "lra/aclImdb" / split / name / f"{number}.txt").write_text(f"{name} {number}")
    monkeypatch.setenv("POLYSKETCH_DATA", str(folder))
    study = study_called("reviews")
    task = study.task_of(study.sizes["paper"], 0)
    assert [task.num_rows(split) for split in ("train", "validation", "test")] == [18, 2, 20]
    assert task.vocab_size == BytesTokenizer().vocab_size
    pieces = dataclasses.replace(study.sizes["paper"], task={"files": "aclImdb", "tokenizer": "bpe:262"})
    assert study.task_of(pieces, 0).vocab_size == 262


def test_every_entry_has_a_study_or_says_why_not():
    assert all(bool(entry.study) != bool(entry.why_not) for entry in ENTRIES)
    assert {entry.study for entry in ENTRIES if entry.study} == STUDIES.keys()
    for name in STUDIES:
        study = study_called(name)
        assert {"smoke", "cpu"} <= study.sizes.keys()
        assert all(study.depends_on(row, 0, study.sizes["smoke"]) for row in study.rows)


def test_the_state_of_softmax_grows_with_the_tokens_and_that_of_linear_attention_does_not():
    models = {name: TransformerLM(ModelConfig(16, 2, 128, 2, attention=name)) for name in ("softmax", "linear")}
    sizes = {name: [state_bytes(model, tokens) for tokens in (64, 128)] for name, model in models.items()}
    a_token = 2 * 2 * 128 * 4  # of two layers keys and values of width 128
    assert sizes["softmax"][1] - sizes["softmax"][0] == 64 * a_token
    assert sizes["linear"][1] == sizes["linear"][0]


GAPS = [
    pytest.param(settings, study_called(name), id=f"{name}-{size}")
    for name in ("recall", "induction", "selective-copying")
    for size, settings in study_called(name).sizes.items()
    if "minimum_gap" in settings.task
]


@pytest.mark.parametrize(("settings", "study"), GAPS)
@pytest.mark.parametrize("name", ["sliding-window", "local", "softmax"])
def test_attention_to_nearby_tokens_alone_cannot_see_an_answer(settings, study, name: str):
    task = study.task_of(settings, 0)
    row = task.row("train", 0)
    asked = row.answer >= 0
    far = int(asked.nonzero()[0][0]) - settings.task["minimum_gap"]
    ids = torch.from_numpy(np.stack([row.ids, np.concatenate([row.ids[:far][::-1], row.ids[far:]])]))
    assert not torch.equal(ids[0], ids[1])
    options = {} if name == "softmax" else {{"local": "local_chunk"}.get(name, "window"): settings.nearby}
    sizes = {"vocab_size": task.vocab_size, "num_layers": settings.layers}
    model = TransformerLM(preset(settings.preset, attention=name, attention_options=options, **sizes)).eval()
    with torch.no_grad():
        one, two = model.hidden_states(ids)[:, torch.from_numpy(asked)]
    assert torch.equal(one, two) == (name != "softmax")


def write_summary(folder: Path, **changes) -> None:
    folder.mkdir(parents=True)
    said = {"study": "recall", "size": "short", "told": "pairs 4", "papers": {"paper": "pairs 64"}, "ours": "x"}
    counts = {"runs": 4, "rows": 3, "own_rows": 2, "of_rows": 18}
    (folder / "summary.json").write_text(json.dumps({**said, **counts, "holds": True, **changes}))


def test_the_list_tells_the_state_of_every_study(folder: Path, capsys):
    assert main(["study", "--list"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    told = " ".join(shown.split())
    studied = [entry.study for entry in ENTRIES if entry.study]
    assert told.count("no record in studies") == len(set(studied))
    assert told.count(": as above") == len(studied) - len(set(studied))
    assert all(entry.claim in told for entry in ENTRIES)


def test_the_list_counts_a_studys_own_rows_and_tells_sizes_and_those_of_papers(folder: Path):
    write_summary(folder / "studies/recall-short")
    write_summary(folder / "studies/recall-short+steps=3", size="short+steps=3", runs=1, rows=1, own_rows=1, holds=None)
    told = " ".join(listed(Path("studies")).split())
    assert (
        "recall: short (pairs 4): 2 of 18 rows and 1 more, 4 runs; x; holds short+steps=3 (pairs 4): 1 of 18 rows"
        in told
    )
    assert "rows, 1 run; x; open paper (pairs 64): no record" in told
    assert told.count("short (pairs 4)") == 1
    write_summary(folder / "studies/recall-paper", size="paper", told="pairs 64", why_open="no y", holds=None)
    told = " ".join(listed(Path("studies")).split())
    assert "paper (pairs 64): 2 of 18 rows and 1 more, 4 runs; x; open (no y)" in told
    assert "paper (pairs 64): no record" not in told
