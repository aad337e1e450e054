"""A run that is stopped anywhere and resumed ends, bit for bit, as the run that was left alone."""

import dataclasses
import itertools
import json
import os
import shutil

import pytest
import torch

from attention.covering import first_always
from polysketch.feature_maps import PerformerFeatures
from polysketch.models import TransformerLM
from polysketch.training import load_model, train
from polysketch.training.checkpoint import list_checkpoints
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import find_start, make_plan


@pytest.fixture(scope="module")
def undisturbed() -> dict:
    """Folders of runs by their options."""
    return {}


@pytest.fixture
def left_alone(make_config, tmp_path_factory, undisturbed):
    """A function that gives the folder of a run that nobody disturbs, made once and not to be changed."""

    def run(**changes):
        options = repr(sorted(changes.items()))
        if options not in undisturbed:
            out = tmp_path_factory.mktemp("alone") / "left-alone"
            undisturbed[options] = train(make_config(out=out, **changes), progress=False).folder
        return undisturbed[options]

    return run


@pytest.fixture
def one_step(left_alone, make_config, tmp_path):
    """The options of a run of one step that has made it."""
    config = make_config(steps=1)
    shutil.copytree(left_alone(steps=1), config.out)
    return config


def kill_at(disk, config, number):
    """Train until file operation `number`, where the process dies; returns whether it came to that."""
    disk.restart()
    disk.fail_at = number
    try:
        train(config, progress=False)
        killed = False
    except disk.Killed:
        killed = True
    disk.restart()
    return killed


def operations_of_a_run(disk, config) -> int:
    disk.restart()
    train(config, progress=False)
    return len(disk.log)


def check_killed_runs(disk, config, expected, numbers, assert_same_outcome):
    for number in numbers:
        shutil.rmtree(config.out, ignore_errors=True)
        assert kill_at(disk, config, number)
        disk.cut_power()
        train(dataclasses.replace(config, resume=True), progress=False)
        assert_same_outcome(config.out, expected)


@pytest.mark.parametrize("speed_of_writing", ["at once", "late"], indirect=True)
def test_killed_before_a_file_operation_and_resumed_it_ends_the_same(
    speed_of_writing, disk, make_config, tmp_path, left_alone, assert_same_outcome
):
    """A sample; the next test takes every one."""
    expected = left_alone()
    count = operations_of_a_run(disk, make_config(out=tmp_path / "counted"))
    check_killed_runs(disk, make_config(), expected, range(1, count, count // 2), assert_same_outcome)


@pytest.mark.full
@pytest.mark.parametrize("speed_of_writing", ["at once", "late", "beside"], indirect=True)
def test_killed_before_any_file_operation_and_resumed_it_ends_the_same(
    speed_of_writing, disk, make_config, tmp_path, left_alone, assert_same_outcome
):
    """Every write, append, sync, rename and delete of a run's configuration, metrics and checkpoints."""
    expected = left_alone()
    count = operations_of_a_run(disk, make_config(out=tmp_path / "counted"))
    check_killed_runs(disk, make_config(), expected, range(count), assert_same_outcome)


def test_killed_again_and_again_it_ends_the_same(disk, make_config, left_alone, assert_same_outcome):
    """Also while resuming: each attempt gets a little further."""
    expected = left_alone()
    config = make_config(resume=True)
    reached = []  # the newest checkpoint that each killed process left
    for number in itertools.count(8, 4):
        if not kill_at(disk, config, number):
            break
        reached += [path.name for path in list_checkpoints(config.out / "checkpoints")[-1:]] or ["none"]
    assert len(reached) >= 5, "too few processes were killed to prove anything"
    assert len(set(reached)) >= 3, "all were killed at the same place"
    assert_same_outcome(config.out, expected)


@pytest.mark.parametrize(
    "changes",
    first_always(
        [
            {"optimizer": "muon", "schedule": "cosine", "activation_checkpointing": True},
            {"activation_checkpointing": True},
            {"accumulation": 2},
            {"dtype": "bfloat16"},
            {"pack": "windows"},
        ]
    ),
)
def test_it_ends_the_same_under_other_ways_of_computing(changes, disk, make_config, left_alone, assert_same_outcome):
    expected = left_alone(**changes)
    config = make_config(**changes, resume=True)
    assert kill_at(disk, config, 70)
    train(config, progress=False)
    assert_same_outcome(config.out, expected)


def test_it_ends_the_same_when_training_draws_random_numbers(
    disk, make_config, tmp_path, assert_same_outcome, monkeypatch
):
    loss = TransformerLM.loss
    monkeypatch.setattr(TransformerLM, "loss", lambda self, *batch: loss(self, *batch) * (1 + torch.rand(())))
    expected = train(make_config(out=tmp_path / "left-alone"), progress=False).folder
    config = make_config(resume=True)
    assert kill_at(disk, config, 70)
    train(config, progress=False)
    assert_same_outcome(config.out, expected)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        pytest.param("polysketch-paper", {"local_chunk": 8, "learned": False}, marks=pytest.mark.full),
        pytest.param("polysketch-heavy", {"local_chunk": 8, "learned": False, "heavy_size": 4}, marks=pytest.mark.full),
        ("polysketch-window", {"window": 8, "features": "random", "far_bias": -6.0}),
    ],
)
def test_it_ends_the_same_when_a_random_sketch_is_redrawn(
    attention, options, disk, make_config, tmp_path, left_alone, assert_same_outcome, outcome
):
    """As below; the sketch's seed comes from the run's."""
    options = {"sketch_size": 8, **options}
    changes = {"attention": attention, "steps": 8}
    fixed = train(make_config(out=tmp_path / "fixed", attention_options=options, **changes), progress=False).folder
    changes["attention_options"] = {**options, "redraw_interval": 3}
    expected = left_alone(**changes)
    drawn, kept = (outcome(run)["tensors"] for run in (expected, fixed))
    assert any("next_seed" in name for name in drawn)
    assert not any("next_seed" in name for name in kept)
    (buffer,) = (name for name in kept if name.endswith("matrices_0"))
    assert not torch.equal(drawn[buffer], kept[buffer])
    count = operations_of_a_run(disk, make_config(out=tmp_path / "counted", **changes))
    check_killed_runs(disk, make_config(**changes), expected, range(60, count, count // 2), assert_same_outcome)


def test_it_ends_the_same_when_features_are_redrawn_between_and_after_checkpoints(
    disk, make_config, tmp_path, left_alone, assert_same_outcome, outcome
):
    """Steps 3 and 6 begin with a draw; checkpoints are of steps 2, 4, 6 and 8."""
    options = {"num_features": 8, "seed": 1, "redraw_interval": 3}
    changes = {"attention": "performer", "attention_options": options, "steps": 8}
    expected = left_alone(**changes)
    features = PerformerFeatures(64, num_features=8, seed=1)
    first = features.weight.clone()
    features.resample()
    features.resample()
    tensors = outcome(expected)["tensors"]
    (name,) = (name for name in tensors if name.endswith("feature_map.weight"))
    assert torch.equal(tensors[name], features.weight)
    assert not torch.equal(tensors[name], first)
    count = operations_of_a_run(disk, make_config(out=tmp_path / "counted", **changes))
    check_killed_runs(disk, make_config(**changes), expected, range(60, count, count // 3), assert_same_outcome)


def test_resuming_a_finished_run_changes_nothing(make_config, left_alone, assert_same_outcome):
    config = make_config(resume=True)
    shutil.copytree(left_alone(), config.out)
    result = train(config, progress=False)
    assert (result.step, result.stopped_by) == (6, "finished")
    assert_same_outcome(config.out, left_alone())


def test_resuming_an_empty_folder_starts_a_new_run(make_config, left_alone, assert_same_outcome):
    """So that one command line can be repeated until the run is done."""
    config = make_config(resume=True)
    config.out.mkdir()
    train(config, progress=False)
    assert_same_outcome(config.out, left_alone())


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(make_config, left_alone):
    """Its metrics, which tell what it learned, would be lost."""
    config = make_config(resume=True)
    shutil.copytree(left_alone(), config.out)
    shutil.rmtree(config.out / "checkpoints")
    before = (config.out / "metrics.jsonl").read_bytes()
    with pytest.raises(FileNotFoundError, match=r"found none, though the run has made 6 steps"):
        train(config, progress=False)
    assert (config.out / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("changes", [{"extend": True}, {"checkpoint": "step-00000002"}, {"checkpoint": "best"}])
def test_a_mistyped_folder_is_no_run_to_go_on_with(make_config, changes):
    config = make_config(resume=True, **changes)
    with pytest.raises(FileNotFoundError, match=r"go on with a run: expected one in .*, found none"):
        train(config, progress=False)
    assert not (config.out / "config.json").exists()


def test_a_named_earlier_checkpoint_gives_the_same_end_and_deletes_nothing(
    make_config, left_alone, assert_same_outcome
):
    expected = left_alone(keep=10)
    config = make_config(keep=10)
    shutil.copytree(expected, config.out)
    train(dataclasses.replace(config, resume=True, checkpoint="step-00000002"), progress=False)
    assert_same_outcome(config.out, expected)
    assert (config.out / "checkpoints" / "set-aside-step-00000006" / "model.safetensors").is_file()


def test_a_damaged_checkpoint_is_refused_and_another_taken_only_when_named(
    make_config, left_alone, assert_same_outcome
):
    expected = left_alone()
    config = make_config()
    shutil.copytree(expected, config.out)
    path = config.out / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = {entry.name: entry.read_bytes() for entry in config.out.glob("*.json*")}
    with pytest.raises(ValueError, match=r"optimizer.safetensors: expected sha256 .*--checkpoint step-00000004"):
        train(dataclasses.replace(config, resume=True), progress=False)
    assert before == {entry.name: entry.read_bytes() for entry in config.out.glob("*.json*")}
    train(dataclasses.replace(config, resume=True, checkpoint="step-00000004"), progress=False)
    assert_same_outcome(config.out, expected)


def test_more_steps_need_extend_and_then_the_schedule_is_that_of_the_longer_run(make_config):
    config = make_config(steps=4)
    train(config, progress=False)
    longer = dataclasses.replace(config, resume=True, steps=8)
    with pytest.raises(ValueError, match=r"--steps was 4 and is now 8; give --extend"):
        train(longer, progress=False)
    assert train(dataclasses.replace(longer, extend=True), progress=False).step == 8
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if line["kind"] == "train"}
    assert rates[5] == pytest.approx(config.learning_rate * 4 / 8)
    assert train(longer, progress=False).step == 8  # the run now has eight steps
    with pytest.raises(ValueError, match=r"--steps was 8 and is now 4"):
        train(dataclasses.replace(config, resume=True, extend=True), progress=False)


def test_a_longer_warmup_of_many_more_steps_is_told(make_config):
    """Step 4 is before the end of a tenth of 50 steps, and behind that of 40; a given warm-up is no surprise."""
    config = make_config(steps=4)
    train(config, progress=False)
    for changes, told in (({"steps": 50}, True), ({"steps": 40}, False), ({"steps": 50, "warmup": 5}, False)):
        lines: list[str] = []
        longer = dataclasses.replace(config, resume=True, extend=True, **changes)
        find_start(RunFolder(config.out), make_plan(longer), lines.append)
        assert [line for line in lines if "rises once more" in line] == [
            "note: the warm-up is a tenth of the steps, was 0 and is now 5: the learning rate rises once more until "
            "then; --warmup 0 leaves it at its peak"
        ] * told


def test_a_wsd_run_made_longer_before_its_decay_ends_as_one_that_was_long_from_the_start(
    make_config, left_alone, assert_same_outcome
):
    """Step 4 of 6 is before the last fifth of either; the warm-up is given, for its default grows with the steps."""
    changes = {"schedule": "wsd", "warmup": 1}
    expected = left_alone(steps=10, **changes)
    config = make_config(keep=9, **changes)
    train(config, progress=False)
    longer = dataclasses.replace(config, resume=True, extend=True, steps=10, checkpoint="step-00000004")
    train(longer, progress=False)
    assert_same_outcome(config.out, expected)


def test_a_run_older_than_an_option_goes_on_as_it_was_trained(make_config, disk, left_alone, assert_same_outcome):
    """Its config.json lacks what is newer than it."""
    expected = left_alone()
    config = make_config(resume=True)
    assert kill_at(disk, config, 70)
    run = RunFolder(config.out)
    saved = run.read_config()
    del saved["training"]["optimizer"], saved["training"]["schedule"]
    run.write_config(saved)
    with pytest.raises(ValueError, match="--optimizer was adamw and is now muon"):
        train(dataclasses.replace(config, optimizer="muon"), progress=False)
    train(config, progress=False)
    assert_same_outcome(config.out, expected)


def test_a_run_of_an_earlier_format_goes_on_as_it_was_trained(make_config, disk, left_alone, assert_same_outcome):
    """When the paper's mechanism was called "polysketch", and presets had nothing around attention."""
    plain = {"projection_convolution": 0, "query_key_norm": False}
    expected = left_alone(**plain)
    config = make_config(resume=True, **plain)
    assert kill_at(disk, config, 70)
    run = RunFolder(config.out)
    saved = run.read_config()
    for entry in (saved["training"], saved["model"]):
        assert entry["attention"] == "polysketch-paper"
        entry["attention"] = "polysketch"
    saved["training"] |= dict.fromkeys(("projection_convolution", "query_key_norm", "head_gate"))
    run.write_config({**saved, "format": 1})
    as_typed_then = {"attention": None, "attention_options": {}, "projection_convolution": None, "query_key_norm": None}
    train(dataclasses.replace(config, **as_typed_then), progress=False)
    assert_same_outcome(config.out, expected)
    assert [name for name, _ in load_model(config.out)[0].config.layers()] == ["polysketch-paper"]


@pytest.mark.parametrize("attention", first_always([None, "polysketch"]))
def test_a_run_with_the_sketches_of_format_2_goes_on_with_them(make_config, disk, left_alone, attention):
    """24 numbers were the default, and no option said so."""
    options = {"window": 8}
    config = make_config(attention="polysketch", attention_options={**options, "sketch_size": 24})
    assert kill_at(disk, config, 70)
    run = RunFolder(config.out)
    saved = run.read_config()
    for entry in (saved["training"], saved["model"]):
        del entry["attention_options"]["sketch_size"]
    run.write_config({**saved, "format": 2})
    train(dataclasses.replace(config, attention=attention, attention_options={}, resume=True), progress=False)
    model, _ = load_model(config.out)
    assert model.config.layers() == [("polysketch", {**options, "sketch_size": 24})]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-3}, r"--learning-rate was 0\.002 and is now 0\.001"),
        ({"seed": 1}, r"--seed was 0 and is now 1"),
        ({"context": 32, "batch_size": 4}, r"--batch-size was 2 and is now 4, --context was 64 and is now 32"),
        ({"attention": "softmax", "attention_options": {}}, r"--attention was [\w-]+ and is now softmax"),
        ({"layers": 2}, r"--layers was 1 and is now 2"),
        ({"dtype": "bfloat16"}, r"--dtype was auto and is now bfloat16"),
        ({"optimizer": "muon"}, r"--optimizer was adamw and is now muon"),
        ({"schedule": "wsd"}, r"--schedule was linear and is now wsd"),
        ({"pack": "windows"}, r"--pack was documents and is now windows"),
        ({"betas": (0.9, 0.98)}, r"--betas was \[0\.9, 0\.95\] and is now \[0\.9, 0\.98\]"),
    ],
)
def test_a_changed_option_is_refused_by_name_with_both_values(one_step, changes, message):
    config = one_step
    before = (config.out / "config.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(config, resume=True, **changes), progress=False)
    assert (config.out / "config.json").read_bytes() == before


def test_options_that_leave_the_computation_alone_may_change(make_config, disk, left_alone, outcome):
    expected = outcome(left_alone(log_every=2))
    config = make_config(resume=True)
    assert kill_at(disk, config, 70)
    changed = dataclasses.replace(config, save_every=3, keep=1, log_every=2, eval_every=5, max_minutes=10.0)
    train(changed, progress=False)
    assert outcome(config.out)["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in outcome(config.out)["tensors"].items():
        assert (tensor == expected["tensors"][name]).all()
    assert RunFolder(config.out).read_config()["training"]["save_every"] == 3


def test_an_option_that_changes_the_rounding_is_told(one_step, capsys):
    config = one_step
    train(dataclasses.replace(config, resume=True, accumulation=2))
    assert "--accumulation was 1 and is now 2: the result agrees" in capsys.readouterr().err


def test_other_data_is_refused_and_the_same_data_elsewhere_is_not(one_step, data_folder, tmp_path):
    config = one_step
    moved = shutil.copytree(data_folder, tmp_path / "moved")
    train(dataclasses.replace(config, resume=True, data=moved), progress=False)
    description = json.loads((moved / "description.json").read_text())
    del description["sha256"]
    (moved / "description.json").write_text(json.dumps(description | {"seed": 99}))
    with pytest.raises(ValueError, match=r"--data: expected the data the run was started with"):
        train(dataclasses.replace(config, resume=True, data=moved), progress=False)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_damaged_copy_of_the_data_is_refused(one_step, data_folder, tmp_path, split):
    config = one_step
    moved = shutil.copytree(data_folder, tmp_path / "moved")
    content = bytearray((moved / f"{split}.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (moved / f"{split}.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{split}\.bin with sha256 .* the file was altered or damaged"):
        train(dataclasses.replace(config, resume=True, data=moved), progress=False)


def test_a_change_of_versions_is_told(one_step, capsys):
    config = one_step
    run = RunFolder(config.out)
    saved = run.read_config()
    saved["environment"]["torch"] = "1.0"
    run.write_config(saved)
    train(dataclasses.replace(config, resume=True))
    assert "note: torch was 1.0 when the run started" in capsys.readouterr().err


def test_a_run_folder_without_resume_is_refused(one_step):
    config = one_step
    with pytest.raises(ValueError, match=r"already holds a run: give --resume"):
        train(config, progress=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_refused(make_config, resume):
    config = make_config(resume=resume)
    config.out.mkdir()
    (config.out / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"expected an empty folder or a run folder, found 'thesis.txt'"):
        train(config, progress=False)
    assert sorted(os.listdir(config.out)) == ["lock", "thesis.txt"]
