"""`polysketch evaluate --contexts | --needle | --recall`: the library's figures, in tables and pictures."""

import json

import numpy as np
import pytest

from polysketch.cli import main
from polysketch.data import PreparedData
from polysketch.evaluation import losses_by_context, make_needles, needle_retrieval, recall_grid


@pytest.fixture(autouse=True)
def _run(stand_in_run):
    stand_in_run()


def figures(capsys: pytest.CaptureFixture[str]) -> dict:
    """The last line, as JSON."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.usefixtures("pixels")
def test_perplexity_by_context_is_what_the_library_measures(capsys, data_folder, small_model, tmp_path):
    """In the table and in the picture's place too."""
    plot = tmp_path / "contexts.png"
    assert main(["evaluate", "run", "--contexts", "16, 64,256", "--plot", str(plot), "--json"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    expected = losses_by_context(small_model, PreparedData.open(data_folder).split("test").tokens, [16, 64, 256])
    assert found["contexts"] == [16, 64, 256]
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert all(f"{value:.3f}" in output for value in found["perplexity"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("pixels")
def test_needles_are_what_the_library_measures(capsys, data_folder, small_model, tmp_path):
    """At the lengths and depths that were asked for."""
    plot = tmp_path / "needle.svg"
    arguments = ["--lengths", "150,300", "--depths", "0,0.5,1", "--trials", "4", "--seed", "3", "--plot", str(plot)]
    assert main(["evaluate", "run", "--needle", *arguments, "--json"]) == 0
    found = figures(capsys)
    data = PreparedData.open(data_folder)
    expected = needle_retrieval(
        small_model,
        data.split("test").tokens,
        make_needles(data.tokenizer.encode),
        lengths=[150, 300],
        depths=[0.0, 0.5, 1.0],
        num_trials=4,
        seed=3,
    )
    np.testing.assert_array_equal(found["accuracy"], expected.accuracy)
    assert found["chance"] == 1 / 8
    assert "<svg" in plot.read_text()


@pytest.mark.usefixtures("pixels")
def test_recall_is_what_the_library_measures(capsys, small_model, tmp_path):
    """Over numbers of pairs and gaps."""
    plot = tmp_path / "recall.png"
    arguments = ["--pairs", "2,4", "--gaps", "0,20", "--trials", "4", "--plot", str(plot), "--json"]
    assert main(["evaluate", "run", "--recall", *arguments]) == 0
    found = figures(capsys)
    expected = recall_grid(small_model, pairs=[2, 4], gaps=[0, 20], num_batches=1, batch_size=4, seed=1234)
    np.testing.assert_array_equal(found["accuracy"], expected.accuracy)
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "64,many"], "--contexts: expected numbers with commas between, found 'many'"),
        (["--contexts", "100000"], "for a context of 100000"),
        (["--needle", "--lengths", "100000"], "a text of at least 100000 tokens"),
        (["--needle", "--lengths", "200", "--depths", "2"], "expected depths from 0"),
        (["--needle", "--trials", "0"], "expected --trials and --batch-size of at least 1"),
        (["--recall", "--pairs", "1000"], "pairs for a vocabulary of 257"),
        (["--recall", "--needle"], "expected one of --tasks, --contexts, --needle, --recall at a time"),
    ],
)
def test_bad_input_gives_one_line_and_status_1(capsys, arguments, message):
    """And no traceback."""
    assert main(["evaluate", "run", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polysketch: ")
    assert message in line
