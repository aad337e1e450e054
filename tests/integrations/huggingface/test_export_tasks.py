"""`polysketch export` of runs that learned a task: what the task asks decides the class of transformers."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from attention.covering import first_always
from polysketch.cli import main
from polysketch.tasks import open_task
from polysketch.training.loading import load_answering_model

TASKS = {
    "next": (["induction", "--set", "length=24"], AutoModelForCausalLM),
    "each": (["reversal", "--set", "length=6"], AutoModelForMaskedLM),
    "class": (["listops", "--set", "length=20", "shortest=10", "depth=2"], AutoModelForSequenceClassification),
    "written": (["reversal", "--set", "length=6", "shortest=3", "asks=written"], AutoModelForSeq2SeqLM),
}
TEXTS = [("good", "I liked every minute of it"), ("bad", "a waste of an evening"), ("good", "she sings, and how")]


def train(data, out) -> None:
    sizes = ["--preset", "tiny", "--layers", "1", "--batch-size", "4", "--steps", "2", "--eval-every", "2"]
    quick = ["--eval-tokens", "100", "--device", "cpu", "--no-tensorboard", "--save-every", "2"]
    assert main(["train", "--data", str(data), "--out", str(out), *sizes, *quick]) == 0


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A run of classified texts."""
    folder = tmp_path_factory.mktemp("reviews")
    rows = [json.dumps({"label": label, "text": text}) for label, text in TEXTS * 8]
    (folder / "train.jsonl").write_text("\n".join(rows))
    assert main(["task", "texts", "--train", str(folder / "train.jsonl"), "--out", str(folder / "data")]) == 0
    train(folder / "data", folder / "run")
    return folder


def logits_of(model, loaded, batch) -> tuple:
    """Of our own model and of the exported one, from a padded batch as training has it."""
    given = dict(batch.inputs)
    if "source" in given:
        found = loaded(given["source"], given["source_mask"].long(), decoder_input_ids=given["ids"])
        return model(**given), found.logits
    mask = {"attention_mask": given["key_mask"].long()} if "key_mask" in given else {}
    return model(**given), loaded(given["ids"], **mask).logits


@pytest.mark.parametrize("asks", first_always(["written", "class", "next", "each"], 2))
def test_transformers_loads_what_was_trained(asks, tmp_path):
    """By the class for what is asked, the same logits; the card has the figures of the run."""
    task, auto = TASKS[asks]
    assert main(["task", *task, "--out", str(tmp_path / "data")]) == 0
    train(tmp_path / "data", tmp_path / "run")
    batch = next(iter(open_task(tmp_path / "data").held_out("test", 3, 3)))
    shutil.rmtree(tmp_path / "data")  # the run is enough
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model, _, _ = load_answering_model(tmp_path / "run")
    expected, found = logits_of(model, auto.from_pretrained(tmp_path / "out"), batch)
    assert torch.equal(found, expected)
    card = (tmp_path / "out" / "README.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = next(line for line in lines if line["kind"] == "evaluation")
    assert f"{measured['loss']:.4f} nats per answer" in card
    assert f"| parameters | {model.num_parameters():,} |" in card
    assert str(tmp_path) not in card + (tmp_path / "out" / "config.json").read_text()
    written = [path for path in (tmp_path / "out").iterdir() if path.name != "SHA256SUMS"]
    assert {path.suffix for path in written} <= {".json", ".safetensors", ".md"}
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 1


def test_texts_come_with_their_tokenizer_and_the_names_of_their_classes(reviews, tmp_path, monkeypatch, capsys):
    """The lines of the card classify a text."""
    assert main(["export", str(reviews / "run"), str(tmp_path / "out")]) == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [text for _, text in TEXTS]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model, _, _ = load_answering_model(reviews / "run")
    expected = model(batch["input_ids"], key_mask=batch["attention_mask"].bool())
    assert torch.equal(loaded(**batch).logits, expected)
    found = pipeline("text-classification", str(tmp_path / "out"), device="cpu")(texts)
    assert [each["label"] for each in found] == [("bad", "good")[index] for index in expected.argmax(1)]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1], {})
    assert "'label'" in capsys.readouterr().out


def test_labels_come_with_their_names_and_sequences_with_their_end(tmp_path):
    """transformers gives the same logits, and stops where a target ends."""
    (tmp_path / "rows.jsonl").write_text(
        "\n".join([json.dumps({"tokens": ["a", "b"], "labels": ["X", "O"], "source": "a", "target": "b"})] * 20)
    )
    for name, auto in (("words", AutoModelForTokenClassification), ("sequences", AutoModelForSeq2SeqLM)):
        data, run, out = (tmp_path / f"{name}-{folder}" for folder in ("data", "run", "out"))
        assert main(["task", name, "--train", str(tmp_path / "rows.jsonl"), "--out", str(data)]) == 0
        train(data, run)
        assert main(["export", str(run), str(out)]) == 0
        model, loaded = load_answering_model(run)[0], auto.from_pretrained(out)
        expected, found = logits_of(model, loaded, open_task(data).rows("train", np.arange(2)))
        assert torch.equal(found, expected)
        if name == "words":
            assert loaded.config.id2label == {0: "O", 1: "X"}
        else:
            assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(out).eos_token_id == 256


def test_an_encoder_of_hidden_tokens_comes_with_a_mask(reviews, tmp_path, make_run):
    """Of the text of a task, and of prepared text; the mask is the last id."""
    sizes = ["--objective", "masked", "--preset", "tiny", "--layers", "1", "--batch-size", "4", "--steps", "1"]
    quick = ["--eval-every", "0", "--device", "cpu", "--no-tensorboard"]
    for data, more in ((reviews / "data", []), (make_run()[1], ["--context", "64"])):
        run, out = tmp_path / f"run-{len(more)}", tmp_path / f"out-{len(more)}"
        assert main(["train", "--data", str(data), "--out", str(run), *sizes, *quick, *more]) == 0
        assert main(["export", str(run), str(out)]) == 0
        loaded, tokenizer = AutoModelForMaskedLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        assert tokenizer.mask_token_id == loaded.config.vocab_size - 1 == 257
        ids = torch.tensor([[*tokenizer("a text")["input_ids"], tokenizer.mask_token_id]])
        assert torch.equal(loaded(ids).logits, load_answering_model(run)[0](ids))


@pytest.mark.parametrize(
    ("task", "learned"),
    [(["compression"], "to recover rows"), (["digits", "--patch", "4"], "a class for a picture in patches")],
)
def test_what_transformers_has_no_class_for_is_refused(task, learned, tmp_path, capsys):
    assert main(["task", *task, "--out", str(tmp_path / "data")]) == 0
    train(tmp_path / "data", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert f"found one that learned {learned}" in capsys.readouterr().err


def test_names_come_from_the_task_where_a_run_has_kept_none(reviews, tmp_path):
    """A run of an earlier version; without the task, classes have numbers."""
    shutil.copytree(reviews / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "task")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"]["folder"] = str(tmp_path / "nowhere")
    del config["sha256"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "numbers")]) == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "numbers")
    assert loaded.config.num_labels == 2
