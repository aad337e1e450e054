"""`polysketch export` and `import`: a run as a folder of transformers and back, whole or not at all."""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention.covering import first_always
from integrations.huggingface.runs import TEXT
from polysketch.cli import main
from polysketch.data import load_tokenizer
from polysketch.integrations.huggingface import (
    PolysketchConfig,
    PolysketchForCausalLM,
    PolysketchForSequenceClassification,
)
from polysketch.training import load_model


@pytest.fixture(scope="session")
def exported(make_run, tmp_path_factory):
    """A function that gives an exported folder of a kind; not to be changed."""
    made = {}

    def export(kind: str = "bytes"):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("exported") / kind
            assert main(["export", str(make_run(kind)[0]), str(made[kind])]) == 0
        return made[kind]

    return export


def evaluation(run, data, capsys) -> dict:
    """What `polysketch evaluate` prints for programs."""
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", str(data), "--split", "test", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {name: value for name, value in figures.items() if name != "run"}


@pytest.mark.parametrize("kind", first_always(["bpe", "bytes", "sentencepiece"], 2))
class TestThereAndBack:
    """For every tokenizer."""

    def test_transformers_loads_what_was_trained(self, kind, make_run, exported):
        """The same logits, the same ids, the ends of texts; safetensors and no pickle."""
        folder = exported(kind)
        model, description = load_model(make_run(kind)[0])
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = description.tokenizer.encode(TEXT[:200])
        assert tokenizer(TEXT[:200])["input_ids"] == ids
        assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])))
        assert loaded.generation_config.eos_token_id == description.tokenizer.end_of_text
        suffixes = {path.suffix for path in folder.iterdir()}
        assert suffixes - {""} <= {".json", ".safetensors", ".md", ".model"}  # SHA256SUMS has none

    def test_a_run_again_gives_the_same_figures(self, kind, make_run, exported, tmp_path, capsys):
        """To the last bit; it is evaluated and generated from, and training starts from it."""
        run, data = make_run(kind)
        back = tmp_path / "back"
        assert main(["import", str(exported(kind)), str(back)]) == 0
        assert evaluation(back, data, capsys) == evaluation(run, data, capsys)
        assert main(["generate", str(back), "--prompt", "It was", "--max-new-tokens", "5"]) == 0
        options = ["--layers", "1", "--attention-options", "sketch_size=4", "window=16", "--context", "32"]
        arguments = ["--data", str(data), "--init-from", str(back), "--steps", "1", "--device", "cpu", *options]
        assert main(["train", "--out", str(tmp_path / "next"), *arguments]) == 0
        assert main(["train", "--out", str(back), "--resume", "--data", str(data)]) == 1

    def test_after_fine_tuning_elsewhere(self, kind, make_run, exported, tmp_path, capsys):
        """Saved by transformers alone: the weights are new, so the step is not that of the run."""
        model, tokenizer = (auto.from_pretrained(exported(kind)) for auto in (AutoModelForCausalLM, AutoTokenizer))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.25)
        model.to(torch.bfloat16).save_pretrained(tmp_path / "tuned")
        tokenizer.save_pretrained(tmp_path / "tuned")
        _, data = make_run(kind)
        arguments = ["import", str(tmp_path / "tuned"), str(tmp_path / "back"), "--data", str(data)]
        if kind == "sentencepiece":  # transformers keeps no .model file
            assert main(arguments) == 1
            assert "--tokenizer" in capsys.readouterr().err
            arguments += ["--tokenizer", str(data)]
        assert main(arguments) == 0
        found, description = load_model(tmp_path / "back")
        assert description.step == 0
        assert description.tokenizer.sha256 == load_tokenizer(data).sha256
        assert torch.equal(found.embedding.weight, model.get_input_embeddings().weight.float())
        assert main(["evaluate", str(tmp_path / "back"), "--max-tokens", "50"]) == 0


def test_what_stands_around_attention_goes_there_and_back(make_run, tmp_path):
    """The same logits, and a line of the card."""
    _, data = make_run()
    sizes = ["--data", str(data), "--layers", "1", "--context", "32", "--steps", "1", "--device", "cpu"]
    around = ["--projection-convolution", "4", "--query-key-norm", "True", "--head-gate", "True"]
    options = ["--attention-options", "window=16", "--eval-every", "0", "--no-tensorboard"]
    assert main(["train", "--out", str(tmp_path / "run"), *sizes, *around, *options]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| around attention | convolution of 4 taps, query key norm, head gate |" in card
    assert main(["import", str(tmp_path / "exported"), str(tmp_path / "back")]) == 0
    ids = torch.arange(40)[None]
    model, back = (load_model(tmp_path / name)[0] for name in ("run", "back"))
    assert back.config == model.config
    assert model.config.projection_convolution == 4
    assert torch.equal(back(ids), model(ids))


def test_the_card_holds_the_figures_of_the_run(make_run, exported):
    """Measured ones, as the run's own files have them."""
    run, _ = make_run()
    card = (exported() / "README.md").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = next(line for line in lines if line["kind"] == "evaluation")
    model, description = load_model(run)
    assert f"| validation loss at step 4 | {measured['loss']:.4f} nats per token on 200 tokens |" in card
    assert f"| validation bits per byte | {measured['bits_per_byte']:.4f} |" in card
    assert f"| parameters | {model.num_parameters():,} |" in card
    assert "| trained for | 4 steps, 512 tokens |" in card
    assert "| context | 64 tokens |" in card
    tokens = description.tokenizer.encode(f"train\n{TEXT}")
    assert f"| train split | {len(tokens) + 1:,} tokens, 1 documents" in card
    state = model.init_state(1)
    model.extend(torch.zeros(1, 300, dtype=torch.int64), state)
    assert f"| state of a sequence | {state.nbytes:,} bytes" in card
    assert str(run.parent) not in card + (exported() / "config.json").read_text()


@pytest.mark.full
def test_the_lines_of_the_card_stream_text(exported):
    """In a fresh interpreter, as they stand."""
    folder = exported()
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout.startswith("The ")
    assert len(result.stdout) > 50


def test_nothing_is_overwritten(make_run, exported, tmp_path, capsys):
    """Neither by export nor by import."""
    run, _ = make_run()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    assert main(["export", str(run), str(tmp_path / "full")]) == 1
    assert "found" in capsys.readouterr().err
    assert main(["import", str(exported()), str(tmp_path / "full")]) == 1
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_an_export_that_fails_leaves_nothing(make_run, tmp_path, monkeypatch):
    """However far it came."""
    monkeypatch.setattr("polysketch.integrations.huggingface.export.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["export", str(make_run()[0]), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_checkpoint_can_be_exported(make_run, tmp_path):
    """By its name, with its own step."""
    run, _ = make_run()
    assert main(["export", str(run), str(tmp_path / "early"), "--checkpoint", "step-00000002"]) == 0
    config = PolysketchConfig.from_pretrained(tmp_path / "early")
    assert config.training_run["step"] == 2
    assert "evaluation" not in config.training_run["metrics"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found no config.json"),
        ({"config.json": '{"model_type": "llama"}'}, "found 'llama'.*polysketch generate"),
        ({"adapter_config.json": "{}"}, "merge_and_unload"),
    ],
)
def test_what_cannot_be_imported_is_named(files, message, tmp_path, capsys):
    """In one line, and no run is left behind."""
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(content)
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_model_with_another_head_is_not_imported(exported, tmp_path, capsys):
    """It would lose it."""
    PolysketchForSequenceClassification.from_pretrained(exported(), num_labels=2).save_pretrained(tmp_path / "head")
    assert main(["import", str(tmp_path / "head"), str(tmp_path / "run")]) == 1
    assert "another head" in capsys.readouterr().err


def test_another_tokenizer_is_refused(make_run, exported, tmp_path, capsys):
    """Ids would mean other text."""
    other = make_run("bpe")[1]
    assert main(["import", str(exported()), str(tmp_path / "run"), "--tokenizer", str(other)]) == 1
    assert "expected the model's tokenizer bytes" in capsys.readouterr().err
    assert main(["import", str(exported()), str(tmp_path / "run"), "--data", str(other)]) == 1
    assert not (tmp_path / "run").exists()


def test_a_model_made_without_a_run_is_imported_with_its_tokenizer(tmp_path, make_run):
    """Trained from scratch with transformers."""
    _, data = make_run("bpe")
    vocabulary = load_tokenizer(data).vocab_size
    config = PolysketchConfig(vocab_size=vocabulary, num_layers=1, hidden_size=16, num_heads=1)
    PolysketchForCausalLM(config).save_pretrained(tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run")]) == 1
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run"), "--tokenizer", str(data)]) == 0
    assert load_model(tmp_path / "run")[1].tokenizer.sha256 == load_tokenizer(data).sha256


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ([1], "facts of a run"),
        ({"data": []}, "data"),
        ({"data": {"splits": True}}, "splits"),
        ({"data": {"splits": {"train": {"file": "train.bin", "tokens": 7}}}}, "sha256"),
        (
            {
                "data": {
                    "splits": {
                        "train": {"file": "../train.bin", "tokens": 7, "documents": 1, "bytes": 7, "sha256": "a"}
                    }
                }
            },
            "train.bin",
        ),
        ({"data": {"dtype": 7}}, "dtype"),
        ({"metrics": {"train": 7}}, "train"),
        ({"step": "7"}, "step"),
    ],
)
def test_what_a_run_cannot_have_said_of_itself_is_refused(make_run, exported, tmp_path, capsys, facts, found):
    _, data = make_run("bytes")
    (tmp_path / "changed").mkdir()
    for path in exported().iterdir():
        (tmp_path / "changed" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | {"training_run": facts}))
    (tmp_path / "changed" / "SHA256SUMS").unlink(missing_ok=True)
    assert main(["import", str(tmp_path / "changed"), str(tmp_path / "run"), "--tokenizer", str(data)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("polysketch: expected ")
    assert message.count("\n") == 1
    assert found in message
    assert not (tmp_path / "run").exists()


def test_nor_does_generate_believe_it(exported, tmp_path, capsys):
    for path in exported().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"training_run": 7}))
    (tmp_path / "SHA256SUMS").unlink()
    assert main(["generate", str(tmp_path), "--max-new-tokens", "1"]) == 1
    assert "expected what an exported run says of itself" in capsys.readouterr().err
