"""The conversion experiment: passages ask for what is far back, and the whole of it runs at its smallest size."""

import dataclasses
import json
import os
import signal

import pytest

from polysketch.cli import main
from polysketch.data import TOKENIZERS
from polysketch.studies.finished import Stopped
from polysketch.studies.linearise import CONVERSIONS, LINEARISE, books_and_passages
from polysketch.studies.passages import FIRST_WORDS, SECOND_WORDS, passage_recall, recall_passages
from polysketch.training.reporting import Progress


def test_passages_list_the_same_pairs_twice_in_another_order():
    listed, recalled = next(recall_passages("train", 1, 24)).strip().split(". ")
    first = [tuple(pair.split()) for pair in listed.removeprefix("remember: ").split(", ")]
    second = [tuple(pair.split()) for pair in recalled.removesuffix(".").removeprefix("recall: ").split(", ")]
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(set(first)) == 24
    assert not set(FIRST_WORDS) & set(SECOND_WORDS)


def test_splits_and_passages_differ():
    passages = [*recall_passages("train", 50, 24), *recall_passages("test", 50, 24)]
    assert len(set(passages)) == 100


@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_most_answers_lie_beyond_a_chunk_on_the_way_back(size):
    """Of n pairs, from pair i of the first list to pair j of the second it is 3 (n - i + j) tokens and more."""
    chunk, pairs = LINEARISE.sizes[size].local_chunk, LINEARISE.sizes[size].pairs
    distances = []
    for passage in recall_passages("test", 50, pairs):
        listed, recalled = (text.split(", ") for text in passage.strip(" .\n").split(". "))
        names = [[pair.split()[-2] for pair in part] for part in (listed, recalled)]
        distances += [3 * (pairs - names[0].index(name) + j) for j, name in enumerate(names[1])]
    assert sum(distance > chunk for distance in distances) > 0.7 * len(distances)


def test_recall_counts_the_words_that_are_known(monkeypatch):
    """A model that knows the answers gets all, one that does not gets none."""
    import torch
    from torch import nn

    class Words:
        def encode(self, text: str) -> list[int]:
            words = text.replace(",", " ,").replace(".", " .").replace(":", " :").split()
            return [table.setdefault(word, len(table)) for word in words]

    class Oracle(nn.Module):
        def __init__(self, right: bool) -> None:
            super().__init__()
            self.weight, self.right = nn.Parameter(torch.zeros(1)), right

        def hidden_states(self, ids):
            self.ids = ids
            answers = torch.zeros_like(ids)
            for row in range(len(ids)):
                seen = dict(zip(ids[row, :-1].tolist(), ids[row, 1:].tolist(), strict=True))
                answers[row] = torch.tensor([seen.get(token, 0) for token in ids[row].tolist()])
            return nn.functional.one_hot(answers if self.right else torch.zeros_like(ids), 200).float()

        def logits(self, hidden):
            return hidden

    table: dict[str, int] = {"unknown": 0}
    passages = list(recall_passages("test", 3, 24))
    assert passage_recall(Oracle(True), Words(), passages, 24) == 1.0
    assert passage_recall(Oracle(False), Words(), passages, 24) == 0.0
    with pytest.raises(ValueError, match="one token a word"):
        passage_recall(Oracle(True), TOKENIZERS["bytes"](), passages, 24)


@pytest.mark.parametrize("size", LINEARISE.sizes)
def test_distilled_variants_make_as_many_steps_as_the_one_that_is_tuned(size):
    settings = LINEARISE.sizes[size]
    names = ("", "-distilled", "-both", "-layers", "-layers-both")
    tuned, *others = (CONVERSIONS[f"polysketch{name}"].stages(settings) for name in names)
    steps = [sum(each[name] for name in each if name.endswith("_steps")) for each in (tuned, *others)]
    assert len(set(steps)) == 1
    assert [each["transfer"] for each in others] == ["mechanisms", "mechanisms", "layers", "layers"]
    assert [each["tuning_steps"] for each in others] == [0, settings.tuning_steps // 2] * 2
    assert others[1]["distillation_steps"] > 0


ROWS = ("polysketch-both", "polysketch-paper-fresh", "softmax")


@pytest.mark.usefixtures("pixels")
def test_every_conversion_is_of_the_same_model_and_leaves_a_record(folder, books):
    pytest.importorskip("transformers")
    assert main(["study", "linearise", "--threads", "1", "--only", *ROWS]) == 0
    runs = folder / "runs/studies/linearise-smoke"
    found = {row: json.loads((runs / f"results/{row}-seed0.json").read_text()) for row in ROWS}
    stages = {row: [line["stage"] for line in record["report"]["stages"]] for row, record in found.items()}
    assert stages["polysketch-paper-fresh"] == ["original", "replaced", "tuning"]
    assert stages["polysketch-both"] == ["original", "replaced", "transfer", "distillation", "tuning"]
    assert stages["softmax"] == ["original", "replaced", "tuning"]
    assert len({record["before"]["loss"] for record in found.values()}) == 1
    original = {row: record["report"]["stages"][0]["loss"] for row, record in found.items()}
    assert original.pop("polysketch-paper-fresh") != original["softmax"]
    assert len(set(original.values())) == 1
    assert len(list(runs.glob("conversion-text-*/description.json"))) == 1
    assert len(list(runs.glob("model-*"))) == len(list(runs.glob("books-and-passages-*/description.json"))) == 1
    assert (runs / "results/conversion.png").stat().st_size > 1_000


def record(row: str, loss: float, recall: float) -> dict:
    return {"row": row, "report": {"stages": [{"loss": loss}]}, "recall": {"after": recall}}


@pytest.mark.parametrize(("loss", "recall", "holds"), [(4.04, 0.48, True), (4.06, 0.6, False), (4.0, 0.47, False)])
def test_the_claim_wants_both_the_loss_and_the_recall(loss, recall, holds):
    records = [record("polysketch-both", loss, recall), record("softmax", 4.0, 0.6)]
    assert LINEARISE.judge(records).holds is holds
    assert LINEARISE.judge(records).ours.startswith(f"polysketch-both {loss - 4:.3f} nats behind")
    assert LINEARISE.judge(records[:1]).holds is None


def test_a_model_that_was_stopped_while_it_learned_goes_on_as_if_nothing_had_happened(folder, books, monkeypatch):
    """Stopped by TERM after two steps, then killed after the next one, and given again."""
    pytest.importorskip("transformers")
    from polysketch.studies import teacher as learning

    settings = dataclasses.replace(LINEARISE.sizes["smoke"], model_steps=6)
    data = books_and_passages(settings, folder / "texts")
    alone = learning.teacher(settings, data, folder / "alone")
    made, update, steps = folder / "stopped", Progress.update, []

    def stopping(self, step, *figures):
        update(self, step, *figures)
        steps.append(step)
        if steps == [1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
        if steps == [1, 2, 3]:
            raise ConnectionAbortedError

    monkeypatch.setattr(Progress, "update", stopping)
    with pytest.raises(Stopped) as stopped:
        learning.teacher(settings, data, made)
    assert stopped.value.signal_number == signal.SIGTERM
    with pytest.raises(ConnectionAbortedError):
        learning.teacher(settings, data, made)
    learning.teacher(settings, data, made)
    assert steps == [1, 2, 3, 3, 4, 5, 6]
    found, expected = ((path / "model.safetensors").read_bytes() for path in (made, alone))
    assert found == expected
    assert not list(folder.glob("*-checkpoints"))
