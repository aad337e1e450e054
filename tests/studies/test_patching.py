"""The study of patched layers: a tiny Llama, its last layers given another attention, one more in each measurement."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polysketch.cli import main
from polysketch.studies import patching
from polysketch.studies.study import Verdict

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


@pytest.fixture
def study(model, tmp_path, monkeypatch):
    """A function that makes the study of size smoke with a text file, and returns the exit status."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)

    def run(*more: str, settings: tuple[str, ...] = (), data: str = "text.txt", folder: Path = model) -> int:
        given = ("--set", f'model="{folder}"', f'data="{data}"', *settings)
        return main(["study", "patched-layers", "--threads", "1", *more, *given])

    return run


def measurements(row: str) -> list[dict]:
    (record,) = Path("runs/studies").glob(f"patched-layers-smoke*/results/{row}-seed0.json")
    return json.loads(record.read_text())["measurements"]


@pytest.mark.usefixtures("pixels")
def test_a_measurement_for_every_number_of_layers_with_a_record_a_table_and_a_plot(study, capsys):
    assert study() == 0
    lines, rows = capsys.readouterr().out.splitlines(), measurements("hyper")
    assert [row["layers"] for row in rows] == list(range(LAYERS + 1))
    assert len({row["perplexity"] for row in rows}) == LAYERS + 1
    for row in rows:
        assert 0 < row["attention_seconds"] < row["forward_seconds"]
        assert any(f"{row['perplexity']:.4g}" in line for line in lines)
    (plot,) = Path("runs/studies").glob("patched-layers-smoke*/results/layers.png")
    assert plot.stat().st_size > 1_000


def test_softmax_in_the_place_of_softmax_leaves_the_perplexity(study):
    assert study("--only", "softmax", settings=("layers=[0, 3]",)) == 0
    first, last = measurements("softmax")
    assert last["loss"] == pytest.approx(first["loss"], abs=1e-5)


def test_a_run_that_was_killed_keeps_its_measurements(study, monkeypatch):
    real, made = patching._measure, []

    def killed(*given):
        made.append(given)
        if len(made) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(patching, "_measure", killed)
    assert study(settings=("layers=[0, 2]",)) == 130
    assert study(settings=("layers=[0, 2]",)) == 0
    assert len(made) == 3
    assert [one["layers"] for one in measurements("hyper")] == [0, 2]


def test_prepared_text_is_read_too(study, tmp_path):
    shares = ["--cut-text", "500", "--validation-share", "0.2"]
    assert main(["prepare", "text.txt", "--tokenizer", "bytes", "--out", "data", *shares]) == 0
    assert study(settings=("layers=[0, 1]", 'split="train"'), data="data") == 0


@pytest.mark.parametrize(
    ("more", "settings", "message"),
    [
        ((), ("layers=[4]",), "expected numbers of layers from 0 to 3"),
        ((), ("context=100000",), "choose a shorter context"),
        ((), ("windows=0",), "expected windows of at least 1"),
        (("--only", "flash"), (), "known mechanisms"),
        (("--only", "hyper+chunk=4"), (), "no option 'chunk'"),
    ],
)
def test_what_does_not_fit_is_told(study, more, settings, message, capsys):
    assert study(*more, settings=settings) == 1
    assert message in capsys.readouterr().err


def test_no_model_is_told(study, tmp_path, capsys):
    assert study(folder=tmp_path) == 1
    assert "config.json" in capsys.readouterr().err
    assert main(["study", "patched-layers"]) == 1
    assert "expected a model that transformers saved and a text" in capsys.readouterr().err


def test_half_of_the_layers_decide():
    def record(*perplexities: float) -> dict:
        rows = [
            {"layers": number, "perplexity": perplexity, "attention_seconds": 1.0 / (1 + number)}
            for number, perplexity in enumerate(perplexities)
        ]
        return {"row": "hyper", "measurements": rows}

    told = "10 becomes 11 with 1 of 2 layers, attention 2.00 times as fast"
    assert patching.PATCHED_LAYERS.judge([record(10.0, 11.0, 20.0)]) == Verdict(told, True)
    assert patching.PATCHED_LAYERS.judge([record(10.0, 12.0, 20.0)]).holds is False
    assert patching.PATCHED_LAYERS.judge([record(10.0)]).holds is None
