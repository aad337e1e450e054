"""The patching experiment: a tiny Llama, its last layers given another attention, one more in each row."""

import contextlib
import csv
import json
from pathlib import Path

import pytest
import torch
from experiments.hyperattention import patching
from experiments.study.command import run_command
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polysketch.cli import main

LAYERS = 3
TEXT = "".join(f"the {number}th of {number * number} words, and {number % 7} more.\n" for number in range(120))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a random model of bytes whose attention is sharp, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **sizes)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text file."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def benchmark(model: Path, data: Path, *flags: str) -> int:
    """Exit status of the command with short windows."""
    common = ["--device", "cpu", "--context", "128", "--windows", "2", "--data", str(data)]
    return run_command("experiments.hyperattention.patching", patching.run, [str(model), *common, *flags])


HYPER = ["--attention-options", "min_length=16", "chunk_size=4", "sample_size=4"]


def test_a_row_for_every_number_of_layers_with_a_record_a_table_and_a_plot(model, text, tmp_path, capsys):
    out, table, plot = (tmp_path / name for name in ("record.json", "table.csv", "plot.png"))
    assert benchmark(model, text, *HYPER, "--json", "--out", str(out), "--csv", str(table), "--plot", str(plot)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads(out.read_text())
    rows = found["measurements"]
    assert [row["layers"] for row in rows] == list(range(LAYERS + 1))
    assert len({row["perplexity"] for row in rows}) == LAYERS + 1
    for row in rows:
        assert 0 < row["attention_seconds"] < row["forward_seconds"]
        assert any(f"{row['perplexity']:.4g}" in line for line in lines[:-1])
    assert [row["layers"] for row in csv.DictReader(table.read_text().splitlines())] == ["0", "1", "2", "3"]
    assert plot.stat().st_size > 1_000


def test_softmax_in_the_place_of_softmax_leaves_the_perplexity(model, text, tmp_path):
    out = tmp_path / "record.json"
    assert benchmark(model, text, "--attention", "softmax", "--layers", "0,3", "--out", str(out)) == 0
    first, last = json.loads(out.read_text())["measurements"]
    assert last["loss"] == pytest.approx(first["loss"], abs=1e-5)


def test_rows_that_the_record_holds_are_not_measured_again(model, text, tmp_path, capsys):
    out = tmp_path / "record.json"
    assert benchmark(model, text, *HYPER, "--layers", "0..2:2", "--out", str(out)) == 0
    before = json.loads(out.read_text())["measurements"]
    assert benchmark(model, text, *HYPER, "--layers", "0..3", "--out", str(out)) == 0
    after = json.loads(out.read_text())["measurements"]
    assert [row["layers"] for row in after] == [0, 1, 2, 3]
    assert [after[0], after[2]] == before
    assert benchmark(model, text, *HYPER, "--seed", "1", "--out", str(out)) == 1
    assert "other settings" in capsys.readouterr().err


def test_prepared_text_is_read_too(model, text, tmp_path, capsys):
    data = tmp_path / "data"
    shares = ["--cut-text", "500", "--validation-share", "0.2"]
    assert main(["prepare", str(text), "--tokenizer", "bytes", "--out", str(data), *shares]) == 0
    assert benchmark(model, data, *HYPER, "--layers", "0,1", "--split", "train", "--windows", "1") == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "0..4"], "from 0 to 3"),
        (["--layers", "few"], "--layers: expected"),
        (["--context", "100000"], "choose a shorter context"),
        (["--attention", "flash"], "known mechanisms"),
        (["--attention-options", "chunk=4"], "no option 'chunk'"),
        (["--windows", "0"], "--windows of at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_explained(model, text, flags, message, capsys):
    with pytest.raises(SystemExit) if "--windows" in flags else contextlib.nullcontext():  # wrong usage, by tyro
        assert benchmark(model, text, *flags) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model_is_explained(text, tmp_path, capsys):
    assert benchmark(tmp_path, text) == 1
    assert "config.json" in capsys.readouterr().err
