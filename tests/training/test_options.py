"""Options are refused early, by their flag, and each declares what its change means for a run that goes on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from polysketch.training import TrainingConfig
from polysketch.training.options import OnResume, RunOptions, as_json, check_changes, flag


def make(**changes) -> TrainingConfig:
    return TrainingConfig(data=Path("data"), out=Path("run"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps: expected at least 1, found 0"),
        ({"batch_size": -1}, "--batch-size: expected at least 1, found -1"),
        ({"keep": 0}, "--keep: expected at least 1"),
        ({"layers": 10**20}, "--layers: expected at most 2147483647, found 1"),
        ({"threads": 10**20}, "--threads: expected at most 2147483647, found 1"),
        ({"weight_decay": float("inf")}, "--weight-decay: expected at most 2147483647, found inf"),
        ({"seed": 10**20}, "--seed: expected a number of 64 bits, found 1"),
        ({"seed": -(10**20)}, "--seed: expected a number of 64 bits, found -1"),
        ({"learning_rate": 0.0}, "--learning-rate: expected a finite number above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate: expected a finite number above 0, found nan"),
        ({"weight_decay": float("nan")}, "--weight-decay: expected at least 0.0, found nan"),
        ({"optimizer": "sgd"}, "--optimizer: expected one of adamw, muon, found 'sgd'"),
        ({"schedule": "constant"}, "--schedule: expected one of linear, cosine, wsd, found 'constant'"),
        ({"dtype": "float16"}, "--dtype: expected one of auto, float32, bfloat16, found 'float16'"),
        ({"betas": (0.9, 1.0)}, "--betas: expected two numbers from 0 to below 1"),
        ({"batch_size": 8, "accumulation": 3}, "--accumulation: expected a divisor of the batch size 8, found 3"),
        ({"steps": 10, "warmup": 11}, "--warmup: expected at most --steps, which is 10, found 11"),
        ({"extend": True}, "give --resume as well"),
        ({"checkpoint": "step-00000001"}, "give --resume as well"),
    ],
)
def test_what_makes_no_sense_is_refused_with_expected_and_found(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_steps_are_told_the_optimizer_and_the_schedule():
    options = make(optimizer="muon", schedule="wsd", steps=50, warmup=5).step_options()
    assert (options.optimizer, options.schedule, options.steps, options.warmup) == ("muon", "wsd", 50, 5)


def meanings(kind: type[RunOptions]) -> dict[str, OnResume | None]:
    return {field.name: field.metadata.get("on_resume") for field in dataclasses.fields(kind)}


def test_every_option_says_what_its_change_means():
    assert all(isinstance(meaning, OnResume) for meaning in meanings(TrainingConfig).values())


def test_what_the_result_depends_on_may_not_change():
    """Held by a list: a new option that is neither here nor refused needs a thought."""
    may_change = {name for name, meaning in meanings(TrainingConfig).items() if meaning is not OnResume.REFUSED}
    assert may_change == {
        *("data", "tokenizer", "vocab_size", "end_of_text"),  # compared by the fingerprint of the data
        *("out", "resume", "checkpoint", "extend", "init_from", "init_new"),
        *("accumulation", "device", "threads", "activation_checkpointing"),
        "mesh",  # compared by what the processes do share
        *("steps", "warmup"),
        *(
            "log_every",
            "eval_every",
            "eval_tokens",
            "save_every",
            "keep",
            "keep_best",
            "max_minutes",
            "tensorboard",
            "tracker",
        ),
        *("tracker_project", "validation"),
    }


@pytest.mark.parametrize(("name", "meaning"), meanings(TrainingConfig).items())
def test_a_change_is_refused_told_or_passed_over_as_declared(name, meaning):
    old = as_json(make(warmup=1))
    new = old | {name: "other" if name != "steps" else 2000}
    if meaning in (OnResume.REFUSED, OnResume.EXTENDING):
        with pytest.raises(ValueError, match=f"{flag(name)} was"):
            check_changes(TrainingConfig, old, new)
    else:
        assert len(check_changes(TrainingConfig, old, new)) == (meaning is OnResume.ROUNDING)


def test_flags_are_spelt_as_on_the_command_line():
    assert flag("learning_rate") == "--learning-rate"


@pytest.mark.parametrize("name", ["optimizer", "schedule", "attention_options", "betas", "layers"])
def test_an_option_newer_than_the_saved_run_has_its_default(name):
    new = as_json(make())
    old = {key: value for key, value in new.items() if key != name}
    assert check_changes(TrainingConfig, old, new) == []


@pytest.mark.parametrize(("name", "value"), [("optimizer", "muon"), ("schedule", "cosine")])
def test_an_option_newer_than_the_saved_run_may_not_differ_from_its_default(name, value):
    old = {key: value for key, value in as_json(make()).items() if key != name}
    with pytest.raises(ValueError, match=f"--{name} was {getattr(make(), name)} and is now {value}"):
        check_changes(TrainingConfig, old, as_json(make(**{name: value})))


def test_an_option_unknown_to_the_saved_run_counts_as_changed():
    with pytest.raises(ValueError, match=r"--dropout was None and is now 0\.1"):
        check_changes(TrainingConfig, {"extend": False}, {"extend": False, "dropout": 0.1})


def test_folders_may_be_texts():
    config = TrainingConfig(data="data", out="run", init_from="earlier")
    assert (config.data, config.out, config.init_from) == (Path("data"), Path("run"), Path("earlier"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "10"}, "--steps: expected a whole number, found '10'"),
        ({"steps": 10.0}, "--steps: expected a whole number, found 10.0"),
        ({"steps": True}, "--steps: expected a whole number, found True"),
        ({"steps": None}, "--steps: expected a whole number, found None"),
        ({"learning_rate": "fast"}, "--learning-rate: expected a number, found 'fast'"),
        ({"compile": "yes"}, "--compile: expected True or False, found 'yes'"),
        ({"compile": 1}, "--compile: expected True or False, found 1"),
        ({"preset": 3}, "--preset: expected a text, found 3"),
        ({"attention_options": "window=3"}, "--attention-options: expected options by name"),
    ],
)
def test_options_of_another_type_are_refused_by_name(options, message):
    with pytest.raises(TypeError, match=message):
        TrainingConfig(data=Path("data"), out=Path("run"), **options)


def test_numbers_of_other_libraries_are_numbers():
    config = TrainingConfig(data=Path("data"), out=Path("run"), steps=np.int64(7), learning_rate=np.float32(0.5))
    assert (config.steps, config.learning_rate) == (7, 0.5)
    json.dumps(as_json(config))
    assert TrainingConfig(data=Path("data"), out=Path("run"), learning_rate=1, max_minutes=None).learning_rate == 1
