"""Books: every row is read at every context, on the same tokens, with its prefix and without; a stop loses nothing."""

import json
import math

import numpy as np
import pytest

from polysketch.cli import main
from polysketch.evaluation import Evaluation
from polysketch.studies import equal_time
from polysketch.studies.books import BOOKS, evaluation_record

PAPER, DEEPER = "polysketch-paper", "polysketch-paper+more_layers=1"
BINS = {"bin_edges": [0, 1], "loss_by_bin": [3.0]}
COMMAND = ["study", "books", "--threads", "1", "--only"]


@pytest.mark.usefixtures("pixels")
def test_every_row_leaves_a_record_of_training_and_evaluations(folder, books):
    assert main([*COMMAND, "softmax", PAPER, DEEPER]) == 0
    results = folder / "runs/studies/books-smoke/results"
    found = {row: json.loads((results / f"{row}-seed0.json").read_text()) for row in ("softmax", PAPER, DEEPER)}
    for row, record in found.items():
        at_64 = record["contexts"]["64"]
        expected = {"64", "128"} | ({"64-without-prefix", "128-without-prefix"} if row != "softmax" else set())
        assert at_64["evaluations"].keys() == expected
        assert {one["num_tokens"] for one in at_64["evaluations"].values()} == {512}
        assert at_64["training"]["curve"]["step"][-1] == BOOKS.sizes["smoke"].steps
    with_prefix, without = (found[PAPER]["contexts"]["64"]["evaluations"][name] for name in ("64", "64-without-prefix"))
    assert with_prefix["loss"] != without["loss"]
    assert with_prefix["loss_by_bin"][0] == pytest.approx(without["loss_by_bin"][0])
    assert found[DEEPER]["settings"]["layers"] == 2
    assert found[DEEPER]["parameters"] > found[PAPER]["parameters"] > found["softmax"]["parameters"]
    names = {"loss-by-tokens-64", "perplexity-by-position-64-read-at-64", "perplexity-by-position-64-read-at-128"}
    assert {path.stem for path in results.glob("*.png")} == names


def test_a_run_stopped_before_its_evaluation_is_gone_on_with_and_not_repeated(folder, books, monkeypatch):
    from polysketch.studies import books as study

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study, "_evaluate", interrupt)
        assert main([*COMMAND, "softmax"]) == 130
    (metrics,) = (folder / "runs/studies/books-smoke").glob("softmax-seed0-*/64/run/metrics.jsonl")
    before = metrics.read_bytes()
    assert main([*COMMAND, "softmax"]) == 0
    assert metrics.read_bytes() == before


def test_a_killed_run_of_so_many_minutes_goes_on_with_as_many_steps(folder, books, monkeypatch):
    from polysketch.studies import books as study

    def interrupt(*arguments):
        raise KeyboardInterrupt

    command = [*COMMAND, "softmax", "--set", "minutes=0.1"]
    monkeypatch.setattr(equal_time, "seconds_a_step", lambda config: 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(study, "_evaluate", interrupt)
        assert main(command) == 130
    monkeypatch.setattr(equal_time, "seconds_a_step", lambda config: 1.0)  # the machine is faster by now
    assert main(command) == 0
    (path,) = folder.glob("runs/studies/books-smoke+minutes=0.1/results/softmax-seed0.json")
    record = json.loads(path.read_text())
    assert record["contexts"]["64"]["training"]["steps"] == 3
    assert record["settings"]["minutes"] == 0.1
    assert "steps" not in record["settings"]


def test_a_step_takes_the_median_of_those_after_the_first(monkeypatch):
    seconds = [50.0, 90.0, 91.0, 92.0, 93.5, 95.5, 97.5]
    monkeypatch.setattr(equal_time, "trained", lambda config: {"curve": {"seconds": seconds}})
    assert equal_time.seconds_a_step(None) == 1.5


def test_without_the_books_and_with_an_unknown_row_one_line_says_what_is_wrong(folder, monkeypatch, capsys):
    monkeypatch.delenv("POLYSKETCH_DATA", raising=False)
    for row, message in (("softmax", "POLYSKETCH_DATA names, found"), ("nystrom", "expected rows of softmax")):
        assert main([*COMMAND, row]) == 1
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


def test_bins_of_positions_keep_the_mean_loss():
    counts = np.array([3] * 100 + [2] * 100)
    losses = np.linspace(5, 1, 200)
    mean = float((losses * counts).sum() / counts.sum())
    edges = np.array([0, 64, 128, 200])
    result = Evaluation(mean, 1.0, None, 500, None, 200, edges, np.zeros(3), losses, counts)
    record = evaluation_record(result, chunk=40)
    weights = np.add.reduceat(counts, np.array(record["bin_edges"])[:-1])
    assert float((np.array(record["loss_by_bin"]) * weights).sum() / weights.sum()) == pytest.approx(mean)


@pytest.mark.parametrize(("contexts", "drawn"), [(("512",), False), (("512", "2048"), True)])
def test_perplexity_is_drawn_against_context_where_models_were_trained_at_several(tmp_path, contexts, drawn):
    pytest.importorskip("matplotlib")
    found = [record("softmax", 30, 20), record(PAPER, 29, 21)]
    for one in found:
        one["contexts"] = {
            context: {
                "training": {"curve": {"tokens": [1], "loss": [3.0]}},
                "evaluations": {context: {**one["contexts"][context]["evaluations"][context], **BINS}},
            }
            for context in contexts
        }
    BOOKS.draw(found, tmp_path)
    path = tmp_path / "perplexity-by-context.png"
    assert path.is_file() is drawn


def record(row: str, *perplexities: float) -> dict:
    found = zip(("512", "2048"), perplexities, strict=True)
    contexts = {context: {"evaluations": {context: {"loss": math.log(one)}}} for context, one in found}
    return {"row": row, "contexts": contexts}


@pytest.mark.parametrize(
    ("paper", "deeper", "holds"), [(20.3, 19.9, True), (20.5, 19.9, False), (20.3, 20.1, False), (19.0, None, None)]
)
def test_the_claim_is_judged_at_every_context_for_as_many_layers_and_for_one_more(paper, deeper, holds):
    """More by at most 2 % with as many, by nothing with one more."""
    records = [record("softmax", 30, 20), record(PAPER, 29, paper)]
    records += [] if deeper is None else [record(DEEPER, 28, deeper)]
    verdict = BOOKS.judge(records)
    assert verdict.holds is holds
    assert verdict.ours.startswith("softmax 30.0 at 512, 20.0 at 2,048; polysketch-paper 29.0")
