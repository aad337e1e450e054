"""`polysketch evaluate`: its figures are the library's, and data that do not fit are refused."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch

from polysketch.cli import main
from polysketch.data import PreparedData, prepare
from polysketch.evaluation import evaluate
from polysketch.models import ModelConfig, TransformerLM
from polysketch.storage import disk


@pytest.fixture(autouse=True)
def _run(stand_in_run):
    stand_in_run()


def figures(capsys: pytest.CaptureFixture[str]) -> dict:
    """The last line, as JSON."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_holds_what_the_library_measures(capsys, data_folder, small_model):
    """On the run's own data, test split and context by default."""
    assert main(["evaluate", "run", "--device", "cpu", "--json"]) == 0
    found = figures(capsys)
    data = PreparedData.open(data_folder)
    tokens = data.split("test").tokens
    expected = evaluate(small_model, tokens, context_length=64, token_bytes=data.tokenizer.token_bytes())
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found["num_tokens"] == len(tokens) - 1
    assert (found["step"], found["split"], found["context_length"]) == (7, "test", 64)


def test_split_context_and_number_of_tokens_are_as_asked(capsys, data_folder):
    """A context longer than in training included."""
    arguments = ["evaluate", "run", "--data", str(data_folder), "--split", "validation", "--context", "300"]
    assert main([*arguments, "--max-tokens", "400", "--span", "50", "--batch-size", "1", "--json"]) == 0
    found = figures(capsys)
    assert (found["split"], found["context_length"], found["num_tokens"]) == ("validation", 300, 400)
    assert found["position_edges"] == [0, 64, 128, 256, 300]


def test_the_table_for_people_shows_the_same_figures(capsys):
    """Loss, perplexity, bits per byte and every bucket."""
    assert main(["evaluate", "run", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found, table = json.loads(last), "\n".join(lines)
    for figure in (f"{found['loss']:.4f}", f"{found['perplexity']:.3f}", f"{found['bits_per_byte']:.4f}"):
        assert figure in table
    assert len(lines) >= 5 + len(found["loss_by_position"])


@pytest.mark.usefixtures("pixels")
def test_the_plot_is_a_picture(tmp_path):
    """Of the loss by position."""
    assert main(["evaluate", "run", "--plot", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_figures_on_a_full_disk_leave_the_earlier_ones(tmp_path, monkeypatch, capsys):
    def full(path, *_, **__):
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    (tmp_path / "figures.json").write_text("earlier")
    monkeypatch.setattr(disk, "write", full)
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["evaluate", "run", "--out", str(tmp_path / "figures.json")]) == 1
    assert "no space left on the disk" in capsys.readouterr().err
    assert (tmp_path / "figures.json").read_bytes() == b"earlier"


def test_without_prefix_switches_the_prefix_off(capsys, stand_in_run):
    """The loss is that of a model whose prefix was removed, not that of the whole model."""
    torch.manual_seed(0)
    options = {"local_chunk": 16, "sketch_size": 16, "learned": False}
    config = ModelConfig(
        257, num_layers=2, hidden_size=64, num_heads=1, attention="polysketch-paper", attention_options=options
    )
    stand_in_run(TransformerLM(config))
    assert main(["evaluate", "run", "--json"]) == 0
    whole = figures(capsys)
    assert main(["evaluate", "run", "--without-prefix", "--json"]) == 0
    without = figures(capsys)
    assert without["without_prefix"]
    assert not whole["without_prefix"]
    assert abs(whole["loss"] - without["loss"]) > 1e-4


def test_data_of_another_tokenizer_are_refused_in_one_line(capsys, tmp_path):
    """Whose ids would mean other text."""
    (tmp_path / "text.txt").write_text("a few words and a few more words\n" * 50)
    prepare([tmp_path / "text.txt"], "bpe:260", tmp_path / "bpe", validation_share=0, test_share=0, progress=False)
    assert main(["evaluate", "run", "--data", str(tmp_path / "bpe")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polysketch: expected the tokenizer of the run run (bytes")
    assert "found that of the data folder" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["elsewhere"], "expected a run folder"),
        (["run", "--data", "nowhere"], "nowhere"),
        (["run", "--context", "1000000"], "for a context of 1000000, found"),
        (["run", "--context", "0"], "context_length of at least 1"),
        (["run", "--span", "0"], "span of at least 1"),
        (["run", "--device", "gpu"], "--device: expected one of auto, cpu"),
        (["run", "--device", "cuda:99"], "--device: expected one of auto, cpu"),
        (["run", "--device", "meta"], "--device: expected one of auto, cpu"),
    ],
)
def test_bad_input_gives_one_line_and_status_1(capsys, arguments, message):
    """And no traceback."""
    assert main(["evaluate", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polysketch: ")
    assert message in line


def test_a_split_that_is_not_one_is_a_usage_error(capsys):
    """With the splits that are."""
    assert main(["evaluate", "run", "--split", "dev"]) == 2
    assert "validation" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(capsys, stand_in_run):
    """No figure is better than NaN, which JSON cannot hold."""
    model = TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))
    torch.nn.init.constant_(model.output_bias, math.nan)
    stand_in_run(model)
    assert main(["evaluate", "run", "--json"]) == 1
    captured = capsys.readouterr()
    assert "expected a finite loss" in captured.err
    assert "NaN" not in captured.out


def test_data_that_have_moved_are_asked_for(capsys, data_folder, stand_in_run, tmp_path):
    """The run remembers where they were; --data says where they are."""
    stand_in_run(data=tmp_path / "moved")
    assert main(["evaluate", "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "found nothing there" in line
    assert "--data" in line
    assert main(["evaluate", "run", "--data", str(data_folder)]) == 0


@pytest.mark.parametrize(("file", "message"), [("a.txt", "expected --plot to end in"), ("no/a.png", "found none")])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_computed(capsys, tmp_path, file, message):
    """The suffix and the folder are looked at first."""
    assert main(["evaluate", "run", "--plot", str(tmp_path / file)]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert message in line
    assert "perplexity" not in printed.out


def test_a_model_without_a_prefix_has_none_to_remove(capsys, stand_in_run):
    """The flag is not ignored in silence."""
    stand_in_run(TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="softmax")))
    assert main(["evaluate", "run", "--without-prefix"]) == 1
    assert "no layer has a sketched prefix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "4"], "expected --pairs with --recall, found it alone"),
        (["--lengths", "64"], "expected --lengths with --needle or --tasks, found it alone"),
        (["--limit", "3"], "expected --limit with --tasks, found it alone"),
        (["--contexts", "64", "--depths", "0.5"], "expected --depths with --needle, found it with --contexts"),
        (["--recall", "--context", "64"], "expected --context without --tasks, --contexts, --needle and --recall"),
    ],
)
def test_flags_of_another_measurement_are_refused(flags, message, capsys):
    """The figures would look like what was asked for."""
    assert main(["evaluate", "run", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
