"""The books experiment at its smallest: what it leaves behind, and that stopping it loses nothing."""

import json
import random

import numpy as np
import pytest
from experiments.foundation import books, books_training
from experiments.foundation.books_evaluation import evaluation_record
from experiments.foundation.books_settings import SIZES
from experiments.study.command import run_command

from polysketch.data import prepare
from polysketch.evaluation import Evaluation

VARIANTS = ("softmax", "gain-0.8", "local")


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Words in random order, prepared as bytes, in all three splits."""
    folder = tmp_path_factory.mktemp("books")
    words = random.Random(0)
    for split in ("train", "validation", "test"):
        (folder / "text" / split).mkdir(parents=True)
        text = " ".join(words.choice(["whale", "ship", "sea", "captain", "harpoon"]) for _ in range(400))
        (folder / "text" / split / "book.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text"], "bytes", folder / "prepared", progress=False)
    return folder / "prepared"


@pytest.fixture(autouse=True)
def _needs_plots():
    pytest.importorskip("matplotlib")


def flags(tmp_path, data_folder, *only):
    """The command line of a run of a second."""
    return ("--size", "smoke", "--data", data_folder, "--out", tmp_path, "--only", *only)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_folder):
    """The folder of a finished experiment."""
    out = tmp_path_factory.mktemp("finished")
    assert run_command("books", books.run, [str(flag) for flag in flags(out, data_folder, *VARIANTS)]) == 0
    return out / "smoke"


def test_every_variant_leaves_a_record_of_training_and_evaluations(finished):
    for name in VARIANTS:
        record = json.loads((finished / "results" / f"{name}.json").read_text())
        training, contexts = record["training"], SIZES["smoke"].test_contexts
        assert training["steps"] == record["measured"]["steps"] == training["curve"]["step"][-1]
        expected = {str(context) for context in contexts}
        expected |= {f"{context}-without-prefix" for context in contexts} if name == "gain-0.8" else set()
        assert record["evaluations"].keys() == expected
        assert {"commit", "processor", "torch", "threads"} <= record["provenance"].keys()


def test_all_variants_are_evaluated_on_the_same_tokens(finished):
    records = [json.loads((finished / "results" / f"{name}.json").read_text()) for name in VARIANTS]
    for context in SIZES["smoke"].test_contexts:
        assert {record["evaluations"][str(context)]["num_tokens"] for record in records} == {512}


def test_removing_the_prefix_changes_the_evaluation(finished):
    evaluations = json.loads((finished / "results" / "gain-0.8.json").read_text())["evaluations"]
    assert evaluations["64"]["loss"] != evaluations["64-without-prefix"]["loss"]
    assert evaluations["64"]["loss_by_bin"][0] == pytest.approx(evaluations["64-without-prefix"]["loss_by_bin"][0])


def test_the_plots_and_a_table_with_every_variant_are_there(finished):
    names = {"loss-by-tokens", "loss-by-minutes", "perplexity-by-position-64", "perplexity-by-position-128"}
    assert {path.stem for path in (finished / "results").glob("*.png")} == names
    assert len((finished / "results" / "table.md").read_text().splitlines()) == 2 + len(VARIANTS)


def test_a_finished_variant_is_kept(finished, data_folder, command, monkeypatch):
    monkeypatch.setattr(books_training, "train", None)
    monkeypatch.setattr(books, "evaluate_run", None)
    assert command(books, *flags(finished.parent, data_folder, *VARIANTS)) == 0


def test_a_run_stopped_before_its_evaluation_is_gone_on_with_and_not_repeated(
    tmp_path, data_folder, command, monkeypatch, capsys
):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(books, "evaluate_run", interrupt)
        assert command(books, *flags(tmp_path, data_folder, "softmax")) == 130
    metrics = (tmp_path / "smoke" / "softmax" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(books_training, "tokens_per_second", interrupt)  # the number of steps is kept as well
    assert command(books, *flags(tmp_path, data_folder, "softmax")) == 0
    assert (tmp_path / "smoke" / "softmax" / "metrics.jsonl").read_bytes() == metrics


def test_the_steps_are_those_that_fit_into_the_minutes(tmp_path, data_folder, monkeypatch):
    monkeypatch.setattr(books_training, "tokens_per_second", lambda config, seconds: 1000.0)
    settings = SIZES["smoke"]
    run = books_training.VariantRun(settings, books.chosen(["softmax"])[0], data_folder, tmp_path / "softmax")
    assert run.choose_steps()["steps"] == int(60 * settings.minutes * 1000 / (settings.batch_size * settings.context))


def test_without_the_books_one_line_says_what_to_set(tmp_path, command, monkeypatch, capsys):
    monkeypatch.delenv("POLYSKETCH_DATA", raising=False)
    assert command(books, "--size", "smoke", "--out", tmp_path) == 1
    message = capsys.readouterr().err
    assert "POLYSKETCH_DATA is not set" in message
    assert message.count("\n") == 1


@pytest.mark.data
def test_real_books_are_prepared_once_with_their_own_split(tmp_path, outside_data, command):
    arguments = ("--size", "smoke", "--out", tmp_path, "--only", "softmax")
    assert command(books, *arguments) == 0
    description = tmp_path / "smoke" / "data" / "description.json"
    assert {name: split["documents"] for name, split in json.loads(description.read_text())["splits"].items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }
    before = description.stat().st_mtime_ns
    assert command(books, *arguments) == 0
    assert description.stat().st_mtime_ns == before


def test_bins_of_positions_keep_the_mean_loss():
    counts = np.array([3] * 100 + [2] * 100)
    losses = np.linspace(5, 1, 200)
    mean = float((losses * counts).sum() / counts.sum())
    edges = np.array([0, 64, 128, 200])
    result = Evaluation(mean, 1.0, None, 500, None, 200, edges, np.zeros(3), losses, counts)
    record = evaluation_record(result, chunk=40)
    weights = np.add.reduceat(counts, np.array(record["bin_edges"])[:-1])
    assert float((np.array(record["loss_by_bin"]) * weights).sum() / weights.sum()) == pytest.approx(mean)
