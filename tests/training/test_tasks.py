"""Training on tasks: what is asked decides the model, kills change nothing, and wrong options are told."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from attention.covering import first_always
from polysketch.cli import main
from polysketch.cli.train import TrainFlags, configuration
from polysketch.models import (
    MaskedLanguageModel,
    PairClassifier,
    PatchClassifier,
    SequenceAutoencoder,
    SequenceClassifier,
    TokenClassifier,
    TransformerEncoderDecoder,
    TransformerLM,
)
from polysketch.models.answering import AnsweringConfig
from polysketch.tasks import AnsweredRows, SequenceAnswers, TaskRows, open_task, task_class, write_task
from polysketch.tasks.reversal import Reversal
from polysketch.tasks.stored import Classification, ClassifiedRows
from polysketch.training import TrainingConfig, load_answering_model, load_model, train
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from training.test_resume import check_killed_runs, operations_of_a_run

MODELS = {
    "next": TransformerLM,
    "each": MaskedLanguageModel,
    "labels": TokenClassifier,
    "class": SequenceClassifier,
    "pair": PairClassifier,
    "picture": PatchClassifier,
    "written": TransformerEncoderDecoder,
    "recovered": SequenceAutoencoder,
}


def small_task(asks: str):
    """One of each kind; rows of most are of unequal length."""
    if asks == "next":
        return task_class("induction")(length=12)
    if asks == "recovered":
        return task_class("compression")(length=8)
    if asks in ("class", "pair"):
        generator, documents = np.random.default_rng(0), 1 + (asks == "pair")
        rows = [generator.integers(0, 9, generator.integers(1, 12)) for _ in range(30 * documents)]
        split = ClassifiedRows.of(rows, [int(row[0]) % 3 for row in rows[::documents]])
        splits = {"train": split, "validation": split, "test": split}
        return Classification(splits, 9, ["a", "b", "c"], documents=documents)
    if asks == "picture":
        pixels = np.random.default_rng(0).integers(0, 256, (30, 4 * 6))
        split = ClassifiedRows.of(list(pixels), [int(row[0]) % 3 for row in pixels])
        splits = {"train": split, "validation": split, "test": split}
        return Classification(splits, 256, ["a", "b", "c"], (4, 6, 1), patch_size=2)
    if asks in ("labels", "sequences"):
        generator = np.random.default_rng(0)
        rows = [generator.integers(1, 9, generator.integers(1, 12)) for _ in range(30)]
        labels = [np.where(np.arange(len(row)) % 2 == 0, row % 3, -100) for row in rows]
        split = AnsweredRows.of(rows, labels if asks == "labels" else [np.append(row[::-1], 0) for row in rows])
        names = ["a", "b", "c"] if asks == "labels" else []
        return SequenceAnswers({"train": split, "validation": split, "test": split}, 9, names)
    return Reversal(asks=asks, length=8, shortest=3)


@pytest.fixture
def make_learning(tmp_path, make_config):
    """Options of a run that learns a small task."""

    def make(asks: str, **changes):
        folder = tmp_path / f"task-{asks}"
        if not folder.exists():
            write_task(small_task(asks), folder)
        unsaid = {"attention": None, "attention_options": {}, "context": TrainingConfig.context}
        return make_config(**{"data": folder, **unsaid, **changes})

    return make


EACH = pytest.mark.parametrize("asks", MODELS)


@EACH
def test_what_a_task_asks_decides_the_model_and_the_run_can_be_measured(asks: str, make_learning, capsys):
    config = make_learning(asks, steps=2, eval_every=1, eval_tokens=500)
    assert train(config, progress=False).stopped_by == "finished"
    model, sizes, description = load_answering_model(config.out)
    assert type(model) is MODELS[asks]
    assert AnsweringConfig.from_dict(json.loads(json.dumps(sizes.to_dict()))) == sizes
    assert description.step == 2
    found = [line for line in MetricsFile(RunFolder(config.out).metrics).read() if line["kind"] == "evaluation"]
    assert [line["step"] for line in found] == [1, 2]
    assert {"loss", "accuracy", "whole_rows", "rows"} <= found[0].keys()
    finite = asks in ("class", "pair", "labels")  # the same rows; others are without end
    few = [] if finite else ["--max-tokens", "500"]
    assert main(["evaluate", str(config.out), "--split", "validation", "--device", "cpu", "--json", *few]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    if finite:
        assert figures["loss"] == pytest.approx(found[-1]["loss"], rel=1e-5)
        assert figures["accuracy"] == found[-1]["accuracy"]
    with pytest.raises(ValueError, match="expected a run that learned text"):
        load_model(config.out)


@EACH
def test_a_step_is_that_of_the_mean_over_all_answers(asks: str, make_learning):
    """However many parts it is computed in: rows have unequal numbers of answers."""
    gradients = []
    for parts in (1, 4):
        plan = make_plan(make_learning(asks, batch_size=8, accumulation=parts, clip=1e9))
        torch.manual_seed(0)
        model = plan.goal.build_model().double()
        updater = Updater(model, plan.config.step_options(), torch.float32)
        found = updater.compute_gradient(plan.goal.rows().batch(3, 8))
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        assert found.tokens == plan.goal.rows().batch(3, 8).num_tokens
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_what_is_validated_does_not_depend_on_the_parts_of_a_step(make_learning, tmp_path):
    """Though they say how many rows are read at a time, and fewer tokens are asked for than a step has."""
    evaluations = []
    for parts in (1, 4):
        config = make_learning(
            "class", out=tmp_path / str(parts), steps=1, eval_every=1, eval_tokens=1, batch_size=8, accumulation=parts
        )
        train(config, progress=False)
        [found] = [line for line in MetricsFile(RunFolder(config.out).metrics).read() if line["kind"] == "evaluation"]
        evaluations.append(found)
    assert [found["rows"] for found in evaluations] == [8, 8]
    assert evaluations[0]["loss"] == pytest.approx(evaluations[1]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "asks", ["class", *(pytest.param(x, marks=pytest.mark.full) for x in ("written", "recovered"))]
)
def test_killed_and_resumed_it_ends_the_same(asks: str, disk, make_learning, assert_same_outcome, tmp_path):
    options = {"steps": 5, "save_every": 2, "eval_every": 2, "batch_size": 16}  # 30 rows: an epoch ends in between
    whole = make_learning(asks, out=tmp_path / "alone", **options)
    count = operations_of_a_run(disk, whole)
    check_killed_runs(disk, make_learning(asks, **options), whole.out, range(1, count, count // 3), assert_same_outcome)


@pytest.mark.parametrize("asks", first_always(["sequences", "labels"]))
def test_sequences_out_of_files_are_learned_and_a_stopped_run_ends_the_same(
    asks: str, make_learning, tmp_path, assert_same_outcome, capsys
):
    whole = make_learning(asks, out=tmp_path / "alone", steps=4, save_every=2, batch_size=16, eval_tokens=1000)
    train(whole, progress=False)
    shutil.copytree(whole.out, tmp_path / "again")
    again = dataclasses.replace(whole, out=tmp_path / "again", resume=True, checkpoint="step-00000002")
    assert train(again, progress=False).step == 4
    assert_same_outcome(again.out, whole.out)
    assert main(["evaluate", str(whole.out), "--device", "cpu", "--json"]) == 0
    told = capsys.readouterr().out
    found = json.loads(told.splitlines()[-1])
    assert (found["rows"], found["answers"]) == (30, small_task(asks).rows("test", np.arange(30)).num_tokens)
    assert "whole rows" in told


def test_every_row_comes_once_an_epoch_in_another_order_each():
    rows = TaskRows(small_task("class"), seed=3)
    seen = [rows.batch(step, 10) for step in range(6)]
    expected = sorted(map(tuple, small_task("class").rows("train", np.arange(30)).inputs["ids"].tolist()))
    epochs = [[tuple(row) for batch in part for row in padded(batch, 11)] for part in (seen[:3], seen[3:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [(*row, *[0] * (11 - len(row))) for row in expected]
    assert epochs[0] != epochs[1]
    assert TaskRows(small_task("class"), seed=4).batch(0, 10).answers.tolist() != seen[0].answers.tolist()


def padded(batch, width: int) -> list[list[int]]:
    ids = batch.inputs["ids"]
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1])).tolist()


@pytest.mark.parametrize(
    ("asks", "changes", "message"),
    [
        ("class", {"attention": "polysketch"}, "causal only, and an encoder sees both sides; mechanisms for it: "),
        ("picture", {"attention": "polysketch"}, "causal only, and an encoder sees both sides; mechanisms for it: "),
        ("picture", {"objective": "masked"}, "expected rows of tokens to hide some of, found pictures in patches"),
        ("each", {"projection_convolution": 4}, "leave it out"),
        ("written", {"attention": "polysketch"}, "read another sequence"),
        ("written", {"attention": "skyformer"}, "read another sequence"),
        ("next", {"attention": "nystrom"}, "cannot be causal"),
        ("next", {"pack": "windows"}, "--pack: .* is a task"),
        ("next", {"context": 99}, "--context: .* is a task"),
        ("next", {"validation": "documents"}, "--validation: .* is a task"),
        ("written", {"attention_options": {"gate": 1}}, "expected --attention beside --attention-options"),
        ("class", {"attention_options": {"window": 8}}, "window"),
        ("next", {"carry_state": True}, "--carry-state: .* is a task"),
        ("class", {"tokenizer": "bytes"}, "--tokenizer: .* is a task"),
        ("class", {"vocab_size": 9}, "--vocab-size: .* is a task"),
    ],
)
def test_what_a_task_cannot_be_learned_with_is_told(asks, changes, message, make_learning):
    config = make_learning(asks, **changes)
    with pytest.raises(ValueError, match=message):
        train(config, progress=False)
    assert not config.out.exists() or not any(path.name != "lock" for path in config.out.iterdir())


def test_a_task_without_validation_rows_wants_no_evaluation(make_learning, tmp_path):
    task = small_task("class")
    write_task(Classification({"train": task.splits["train"]}, 9, ["a", "b", "c"]), tmp_path / "task-class")
    with pytest.raises(ValueError, match="expected validation rows"):
        train(make_learning("class"), progress=False)
    assert train(make_learning("class", eval_every=0, steps=1), progress=False).step == 1


def test_a_run_does_not_go_on_with_another_task(make_learning, tmp_path):
    config = make_learning("class", steps=2)
    train(config, progress=False)
    other = tmp_path / "other"
    write_task(small_task("each"), other)
    with pytest.raises(ValueError, match="expected the data the run was started with"):
        train(make_learning("class", steps=3, resume=True, extend=True, data=other), progress=False)


def test_another_task_of_other_answers_is_refused_in_one_line(make_learning, capsys, tmp_path):
    config = make_learning("each", steps=1, eval_every=0)
    train(config, progress=False)
    longer, other = tmp_path / "longer", tmp_path / "others"
    write_task(Reversal(length=20), longer)
    write_task(Reversal(length=20, symbols=11), other)
    assert main(["evaluate", str(config.out), "--data", str(longer), "--max-tokens", "100", "--device", "cpu"]) == 0
    assert "rows of up to 20 tokens" in capsys.readouterr().out
    assert open_task(longer).longest == 20
    for arguments, message in (
        (["--data", str(other)], "expected a task that asks 'each' with 11 ids"),
        (["--recall"], "--recall: expected a run that learned text"),
        (["--context", "64"], "--context: expected a run that learned text"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--without-prefix"], "--without-prefix: expected a run that learned text"),
        (["--data", str(tmp_path)], "expected a folder with task.json"),
    ):
        assert main(["evaluate", str(config.out), "--device", "cpu", *arguments]) == 1
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1
    assert main(["generate", str(config.out), "--prompt", "x"]) == 1
    assert "expected a run that learned text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "other", "message"),
    [
        ("memorization", {"length": 8, "vocabulary": 9, "seed": 1}, {"seed": 0}, "expected seed 1"),
        (
            "in-context-recall",
            {"length": 16, "vocabulary": 8, "noise_vocabulary": 4, "noise_share": 0.2},
            {"vocabulary": 12, "noise_vocabulary": 0, "noise_share": 0.0},
            "expected vocabulary 8",
        ),
    ],
)
def test_what_a_run_had_no_way_to_learn_is_refused(name, options, other, message, make_learning, capsys, tmp_path):
    for folder, changes in (("own", {}), ("longer", {"length": 32}), ("other", other)):
        write_task(task_class(name)(**{**options, **changes}), tmp_path / folder)
    run = make_learning("next", data=tmp_path / "own", steps=1, eval_every=0).out
    train(make_learning("next", data=tmp_path / "own", steps=1, eval_every=0), progress=False)
    arguments = ["evaluate", str(run), "--max-tokens", "64", "--device", "cpu"]
    assert main(arguments) == 0
    assert main([*arguments, "--data", str(tmp_path / "longer")]) == 0
    assert main([*arguments, "--data", str(tmp_path / "other")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "patch_size"), [((6, 4, 1), 2), ((4, 6, 1), 1), ((2, 3, 4), 1)])
def test_pictures_in_another_grid_are_refused(shape, patch_size, make_learning, capsys, tmp_path):
    config = make_learning("picture", steps=1, eval_every=0)
    train(config, progress=False)
    task, other = open_task(config.data), tmp_path / "other"
    write_task(Classification(task.splits, 256, ["a", "b", "c"], shape, patch_size=patch_size), other)
    assert main(["evaluate", str(config.out), "--data", str(other), "--device", "cpu"]) == 1
    told = capsys.readouterr().err
    assert "expected pictures of 4 x 6 x 1 in patches of 2" in told
    assert f"found pictures of {' x '.join(map(str, shape))} in patches of {patch_size}" in told


def test_an_encoder_of_pictures_wider_than_their_brightness_gives_its_body(make_learning, tmp_path):
    """Its embedding is a matrix of patches, whose rows are not ids."""
    first = make_learning("picture", out=tmp_path / "first", steps=1, eval_every=0, preset="mini", layers=1)
    train(first, progress=False)
    task, other = open_task(first.data), tmp_path / "five"
    write_task(Classification(task.splits, 256, list("abcde"), (4, 6, 1), patch_size=2), other)
    config = dataclasses.replace(first, data=other, out=tmp_path / "second", init_from=first.out)
    goal = make_plan(config).goal
    model = goal.build_model()
    goal.initialize(model, torch.device("cpu"), torch.float32)
    body = load_answering_model(first.out)[0].encoder.state_dict()
    assert len(body["embedding.weight"]) > 256
    for name, tensor in model.encoder.state_dict().items():
        torch.testing.assert_close(tensor, body[name], rtol=0, atol=0)


@pytest.mark.parametrize("kept", [True, False])
def test_the_same_classes_in_another_order_are_refused(kept: bool, make_learning, capsys, tmp_path):
    config = make_learning("class", steps=1, eval_every=0)
    train(config, progress=False)
    task, swapped = open_task(config.data), tmp_path / "swapped"
    write_task(Classification(task.splits, 9, ["b", "a", "c"]), swapped)
    if not kept:  # by a run of an earlier version
        shutil.rmtree(RunFolder(config.out).task)
    assert main(["evaluate", str(config.out), "--device", "cpu"]) == 0
    assert main(["evaluate", str(config.out), "--device", "cpu", "--data", str(swapped)]) == 1
    assert (
        "expected the classes that the run learned, in their order, a, b, c, found b, a, c" in capsys.readouterr().err
    )


@pytest.fixture
def make_masked(make_learning, data_folder):
    """Options of a run that finds hidden tokens, in what a task asks about or in text."""

    def make(where: str, **changes) -> TrainingConfig:
        given = {"data": data_folder, "context": 48} if where == "text" else {}
        return make_learning("class" if where == "text" else where, **{"objective": "masked", **given, **changes})

    return make


@pytest.mark.parametrize("where", first_always(["text", "pair", "class", "next"], 2))
def test_hidden_tokens_are_learned_and_a_stopped_run_ends_the_same(
    where: str, make_masked, tmp_path, assert_same_outcome, capsys
):
    whole = make_masked(where, out=tmp_path / "alone", steps=4, batch_size=8, eval_tokens=800)
    train(whole, progress=False)
    shutil.copytree(whole.out, tmp_path / "again")
    again = dataclasses.replace(whole, out=tmp_path / "again", resume=True, checkpoint="step-00000002")
    assert train(again, progress=False).step == 4
    assert_same_outcome(again.out, whole.out)
    model, sizes, _ = load_answering_model(whole.out)
    assert type(model) is MaskedLanguageModel
    assert sizes.vocab_size == {"text": 257, "class": 9, "pair": 9, "next": 17}[where] + 1
    found = [line for line in MetricsFile(RunFolder(whole.out).metrics).read() if line["kind"] == "evaluation"]
    assert {"loss", "accuracy"} <= found[-1].keys()
    arguments = ["evaluate", str(whole.out), "--split", "validation", "--device", "cpu", "--max-tokens", "800"]
    assert main([*arguments, "--data", str(whole.data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] == pytest.approx(found[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("pretrained", "tuned"), first_always([("class", "pair"), ("pair", "class"), ("class", "class")], 2, several=True)
)
def test_an_encoder_gives_its_body_and_leaves_its_mask_behind(pretrained, tuned, make_masked, make_learning, tmp_path):
    first = make_masked(pretrained, out=tmp_path / "first", steps=2, eval_every=0)
    train(first, progress=False)
    config = make_learning(tuned, init_from=first.out, steps=1, eval_every=0)
    goal = make_plan(config).goal
    torch.manual_seed(5)
    model = goal.build_model()
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    goal.initialize(model, torch.device("cpu"), torch.float32)
    body = load_answering_model(first.out)[0].encoder.state_dict()
    for name, tensor in model.state_dict().items():
        part, _, rest = name.partition(".")
        expected = body[rest][: len(tensor)] if part == "encoder" else untouched[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert len(body["embedding.weight"]) == 10
    assert any("the encoder; what stands on it is new" in note for note in goal.notes(model, goal.rows()))
    assert train(config, progress=False).step == 1


def test_a_model_of_the_same_sizes_gives_all_weights(make_learning, tmp_path):
    first = make_learning("recovered", out=tmp_path / "first", steps=1, eval_every=0)
    train(first, progress=False)
    goal = make_plan(make_learning("recovered", init_from=first.out)).goal
    model = goal.build_model()
    goal.initialize(model, torch.device("cpu"), torch.float32)
    for name, tensor in load_answering_model(first.out)[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused_in_one_line(make_masked, make_learning, make_config, tmp_path):
    text = make_masked("text", out=tmp_path / "text", steps=1, eval_every=0)
    masked = make_masked("class", out=tmp_path / "masked", steps=1, eval_every=0)
    causal = make_config(out=tmp_path / "causal", steps=1, eval_every=0)
    for run in (text, masked, causal):
        train(run, progress=False)
    named = Classification(small_task("class").splits, 9, ["a", "b", "c"], alphabet="pixels")
    write_task(named, tmp_path / "named")
    for run, changes, message in (
        (text, {}, "expected a run with 9 ids, found one with 257"),
        (text, {"data": tmp_path / "named"}, "expected a run whose ids stand for the same as here, pixels, found"),
        (masked, {"layers": 2}, "expected an encoder of the same sizes, found num_layers 1 in .* and 2 here"),
        (masked, {"attention": "linear"}, "of the same sizes, found attention"),
        (causal, {}, "expected a run that learned a task, or --objective masked"),
    ):
        with pytest.raises(ValueError, match=f"--init-from: .*{message}"):
            train(make_learning("class", init_from=run.out, **changes), progress=False)
    with pytest.raises(
        ValueError, match="--init-new: expected a run that asks 'class' of 9 ids, as this one, found one"
    ):
        train(make_learning("class", init_from=masked.out, init_new=("feature_map",)), progress=False)
    with pytest.raises(ValueError, match="--init-from: expected an encoder for an encoder"):
        train(make_learning("next", init_from=masked.out), progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"carry_state": True}, "--carry-state: expected windows of text"),
        ({"pack": "documents"}, "--pack documents: expected windows of text"),
        ({"validation": "carried"}, "--validation carried: expected windows of text"),
        ({"attention": "polysketch"}, "causal only, and an encoder sees both sides"),
    ],
)
def test_what_hidden_tokens_cannot_be_learned_with_is_told(changes, message, make_masked):
    with pytest.raises(ValueError, match=message):
        train(make_masked("text", **changes), progress=False)
    with pytest.raises(ValueError, match="--mask-share: expected --objective masked"):
        make_masked("text", objective="auto", mask_share=0.3)


def test_options_are_those_of_the_mechanism_that_is_used(make_learning):
    """An encoder has another one than the preset; the preset's has no option of this name."""
    folder = make_learning("class").data
    flags = TrainFlags(data=folder, out=folder.parent / "out", attention_options=("local_chunk=8",))
    plan = make_plan(configuration(flags))
    assert [options for _, options in plan.goal.sizes.sizes.layers()] == [{"local_chunk": 8}] * 4
    written = make_learning("written").data
    with pytest.raises(ValueError, match="expected --attention beside --attention-options"):
        configuration(dataclasses.replace(flags, data=written))


@pytest.mark.parametrize("options", [(), ("window=8",)])
def test_a_causal_model_of_a_task_has_the_presets_own_layers(options, make_learning):
    folder = make_learning("next").data
    plan = make_plan(configuration(TrainFlags(data=folder, out=folder.parent / "out", attention_options=options)))
    window = "sliding-window"
    assert [name for name, _ in plan.goal.sizes.sizes.layers()] == [window, "polysketch"] * 2
