"""Recall by every causal mechanism: every name is there, none can find an answer nearby, one run is lost at most."""

import dataclasses
import json

import pytest
from experiments.mechanisms import comparison, recall
from experiments.mechanisms.variants import NEARBY, VARIANTS, chosen
from experiments.synthetic.training import TaskRun

from polysketch import attention

SMOKE = recall.SIZES["smoke"]


def test_every_causal_name_of_the_librarys_table_is_run():
    causal = {name for name, kind in attention.MECHANISMS.items() if kind.is_causal}
    assert {variant.attention for variant in VARIANTS.values()} == causal
    assert causal <= VARIANTS.keys()


EVERY_THIRD = [
    pytest.param(variant, id=name, marks=[pytest.mark.full] * (place % 3 > 0))
    for place, (name, variant) in enumerate(VARIANTS.items())
]


@pytest.mark.parametrize("task", recall.SIZES.values(), ids=recall.SIZES)
def test_every_answer_lies_two_local_chunks_before_its_question(task):
    _, labels = task.batch(0)
    assert (labels != -100).nonzero()[:, 1].min() - 2 * task.pairs >= 2 * task.local_chunk


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_nothing_that_counts_nearby_tokens_is_longer_than_the_local_chunk(variant):
    options = json.loads(json.dumps(variant.attention_options(local_chunk=16, num_heads=2)))
    mechanism = attention.build(variant.attention, num_heads=2, head_dim=64, **options)
    assert [getattr(mechanism, name, None) in (None, 16) for name in NEARBY] == [True] * len(NEARBY)


@pytest.mark.parametrize("variant", EVERY_THIRD)
def test_every_mechanism_trains_and_its_state_is_measured(variant):
    record = TaskRun(dataclasses.replace(SMOKE, steps=1), variant, lambda line: None).train()
    assert record["steps"] == 1
    assert record["curve"][-1]["loss"] < 10
    assert comparison.state_bytes(SMOKE, variant, 40) > 0


def test_the_state_of_softmax_grows_with_the_tokens_and_that_of_linear_attention_does_not():
    sizes = {
        name: [comparison.state_bytes(SMOKE, VARIANTS[name], n) for n in (64, 128)] for name in ("softmax", "linear")
    }
    a_token = 2 * 2 * 128 * 4  # of two layers keys and values of width 128
    assert sizes["softmax"][1] - sizes["softmax"][0] == 64 * a_token
    assert sizes["linear"][1] == sizes["linear"][0]


def test_the_command_leaves_records_a_plot_and_a_table_and_keeps_what_is_finished(tmp_path, command, monkeypatch):
    pytest.importorskip("matplotlib")
    names = ("softmax", "sliding-window")
    arguments = ("--size", "smoke", "--only", *names, "--out", tmp_path)
    assert command(recall, *arguments) == 0
    results = tmp_path / "smoke" / "results"
    for name in names:
        record = json.loads((results / f"{name}-seed0.json").read_text())
        assert record["curve"][-1]["step"] == record["steps"] == SMOKE.steps
        assert record["processor_seconds_per_step"] > 0
        assert {"commit", "processor", "torch", "threads"} <= record["provenance"].keys()
    assert (results / "accuracy.png").stat().st_size > 1000
    lines = (results / "table.md").read_text().splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(names)
    assert command(recall, *arguments[:3], "softmax", *arguments[-2:], "--pairs", "1", "--length", "40") == 0
    assert json.loads((results / "softmax-1-seed0.json").read_text())["settings"]["length"] == 40
    monkeypatch.setattr(comparison, "TaskRun", None)
    assert command(recall, *arguments) == 0


def test_names_are_chosen_once_in_the_order_of_the_table_and_unknown_ones_refused():
    assert [variant.name for variant in chosen(["linear", "softmax", "linear"])] == ["softmax", "linear"]
    with pytest.raises(ValueError, match=r"unknown name sofmax; known names: softmax, polynomial"):
        chosen(["sofmax"])
