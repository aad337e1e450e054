"""Configurations of an earlier version name the mechanisms that they meant."""

import pytest

from polysketch.models.former import (
    attention_of_format_1,
    mechanism_of_format_1,
    model_of_format_1,
    training_of_format_1,
)

PLAIN = {"projection_convolution": 0, "query_key_norm": False, "head_gate": False, "input_positions": True}


@pytest.mark.parametrize(
    ("then", "now"),
    [("polysketch", "polysketch-paper"), ("polysketch-delta", "polysketch"), ("polysketch-heavy", "polysketch-heavy")],
)
def test_a_name_of_then_is_one_of_today(then: str, now: str):
    assert mechanism_of_format_1(then) == now
    assert attention_of_format_1({"attention": then, "attention_options": {"polysketch": 3}}) == {
        "attention": now,
        "attention_options": {"polysketch": 3},
    }


def test_patterns_are_renamed_wherever_they_stand():
    then = {
        "attention": ["polysketch", "softmax", "polysketch-delta"],
        "attention_options": {"polysketch": {"degree": 2}, "polysketch-delta": {"window": 3}},
        "rotary": ["polysketch", "softmax"],
        "num_layers": 3,
    }
    assert attention_of_format_1(then) == {
        "attention": ["polysketch-paper", "softmax", "polysketch"],
        "attention_options": {"polysketch-paper": {"degree": 2}, "polysketch": {"window": 3}},
        "rotary": ["polysketch-paper", "softmax"],
        "num_layers": 3,
    }


@pytest.mark.parametrize("missing", [{}, {"attention": None, "projection_convolution": None, "query_key_norm": None}])
def test_what_had_another_default_is_said(missing: dict):
    assert model_of_format_1({"num_layers": 2, **missing}) == {
        "num_layers": 2,
        "attention": "polysketch-paper",
        **PLAIN,
    }


def test_what_was_said_stays():
    then = {"attention": "softmax", "rotary": False, "projection_convolution": 4, "query_key_norm": True}
    assert model_of_format_1(then) == {**then, "head_gate": False, "input_positions": True}


def test_what_a_training_left_to_its_preset_is_as_in_its_model():
    training = {"attention": "polysketch", "projection_convolution": None, "head_gate": None, "steps": 3}
    found = training_of_format_1(training, {"projection_convolution": 3, "input_positions": False})
    expected = {**PLAIN, "projection_convolution": 3, "input_positions": False}
    assert found == {"attention": "polysketch-paper", "steps": 3, **expected}
