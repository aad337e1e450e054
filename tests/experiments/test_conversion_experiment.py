"""The conversion experiment: passages ask for what is far back, and the whole of it runs at its smallest size."""

import dataclasses
import json

import pytest
from experiments.conversion import linearise
from experiments.conversion.corpus import FIRST_WORDS, SECOND_WORDS, recall_passages
from experiments.conversion.recall import passage_recall

from polysketch.data import TOKENIZERS


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


def test_most_answers_lie_beyond_a_chunk_on_the_way_back():
    """Of n pairs, from pair i of the first list to pair j of the second it is 3 (n - i + j) tokens and more."""
    chunk, pairs = linearise.SIZES["cpu"].local_chunk, linearise.SIZES["cpu"].corpus.pairs
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


@pytest.mark.parametrize("size", linearise.SIZES)
def test_distilled_variants_make_as_many_steps_as_the_one_that_is_tuned(size):
    settings = linearise.SIZES[size]
    names = ("delta", "delta-distilled", "delta-both", "delta-layers", "delta-layers-both")
    tuned, *others = (linearise.VARIANTS[name].stages(settings) for name in names)
    steps = [sum(each[name] for name in each if name.endswith("_steps")) for each in (tuned, *others)]
    assert len(set(steps)) == 1
    assert [each["transfer"] for each in others] == ["mechanisms", "mechanisms", "layers", "layers"]
    assert [each["tuning_steps"] for each in others] == [0, settings.tuning_steps // 2] * 2
    assert others[1]["distillation_steps"] > 0


def test_everything_runs_at_the_smallest_size(tmp_path, outside_data, capsys, monkeypatch):
    from experiments.study.command import run_command

    flags = ["--size", "smoke", "--out", str(tmp_path), "--only", "polysketch", "delta", "window", "fresh"]
    flags += ["delta-distilled", "delta-layers-both"]
    assert run_command("experiments.conversion.linearise", linearise.run, flags) == 0
    printed = capsys.readouterr().out
    assert all(label in printed for label in ("polysketch-paper, fresh attention", "polysketch", "window alone"))
    record = json.loads((tmp_path / "smoke" / "results" / "polysketch.json").read_text())
    assert [line["stage"] for line in record["report"]["stages"]] == ["original", "replaced", "transfer", "tuning"]
    record = json.loads((tmp_path / "smoke" / "results" / "delta-distilled.json").read_text())
    assert record["report"]["stages"][-1]["stage"] == "distillation"
    assert (tmp_path / "smoke" / "results" / "conversion.png").is_file()
    smoke = linearise.SIZES["smoke"]
    other = dataclasses.replace(smoke, teacher=dataclasses.replace(smoke.teacher, steps=3))
    monkeypatch.setitem(linearise.SIZES, "smoke", other)
    assert run_command("experiments.conversion.linearise", linearise.run, flags) == 1
    assert "made with other settings: teacher was" in capsys.readouterr().err
