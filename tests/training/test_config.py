"""Options are refused early, by their flag."""

from pathlib import Path

import pytest

from polysketch.training import TrainingConfig
from polysketch.training.config import flag
from polysketch.training.resume import FREE, ROUNDING, check_options


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


def test_every_option_has_a_place_in_the_table_of_changes_or_is_fixed():
    assert FREE.keys() | set(ROUNDING) <= set(TrainingConfig.__dataclass_fields__)
    assert not FREE.keys() & set(ROUNDING)


def test_flags_are_spelt_as_on_the_command_line():
    assert flag("learning_rate") == "--learning-rate"


def test_an_option_unknown_to_the_saved_run_counts_as_changed():
    with pytest.raises(ValueError, match=r"--dropout was None and is now 0\.1"):
        check_options({"extend": False}, {"extend": False, "dropout": 0.1})
